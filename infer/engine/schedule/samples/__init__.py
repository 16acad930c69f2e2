"""Sequences: their tokens, the keys of their blocks, their proposals by lookup, their shares of steps, their text."""
