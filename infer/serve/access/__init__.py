"""The access to a server: certificates, tokens and callers."""
