"""A run folder: its committed steps, the one job that writes in it, and the leftovers of dead jobs."""
