"""Kernels of rows of activations: norms, gates, products and samples."""
