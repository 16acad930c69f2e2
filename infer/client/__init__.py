"""The client of a server: calls, credentials, retries, and the conversion to the wire."""
