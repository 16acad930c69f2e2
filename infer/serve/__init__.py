"""The server: protocols around an engine, access to it, and its operation."""
