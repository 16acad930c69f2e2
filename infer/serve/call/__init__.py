"""The way of a request, whatever the protocol: its message, its tokens, its run and its line in the log."""
