"""HTTP/1.1 as bytes: connections, messages, bodies, errors, TLS."""
