"""Metrics of the requests of a server."""
