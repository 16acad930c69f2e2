"""Samples: their tokens, the tables and keys of their blocks, their proposals by lookup, and their text."""
