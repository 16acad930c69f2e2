"""The Python interface: an engine in this process, a client of a server, and the conversion to the wire."""
