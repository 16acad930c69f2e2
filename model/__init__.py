"""The decoder language model, shared by training and inference. Importing this package imports no torch."""
