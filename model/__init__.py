"""The decoder language model, written once for training and inference. Importing this package imports no torch."""
