"""Saving: each rank writes its part, and rank 0 commits the step, in the rank's process or in the background."""
