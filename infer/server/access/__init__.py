"""The access to a server: certificates, tokens, and the guard before all calls."""
