"""Packed weights in files, which servers of one model, and their later starts, map together."""
