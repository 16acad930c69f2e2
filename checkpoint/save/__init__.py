"""Saving: each rank writes its part, rank 0 commits the step, in place or in the background."""
