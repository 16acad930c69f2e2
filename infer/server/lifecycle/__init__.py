"""The states of a server: how it comes to serve and to drain, its health service, and its warm-up."""
