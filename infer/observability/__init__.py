"""Metrics and traces of the requests of a server."""
