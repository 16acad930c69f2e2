"""A run of `tk train` on one rank: its inputs, its start, and the training loop."""
