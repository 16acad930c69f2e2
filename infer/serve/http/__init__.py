"""HTTP/1.1 as bytes: connections, messages, bodies, errors, TLS, and the way from a path to its handler."""
