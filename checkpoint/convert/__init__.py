"""Conversions of checkpoints in bounded memory: reshard, export and diff."""
