"""A decoder lowered to a tuple of operations, which a backend prepares and runs; plain Python without torch."""
