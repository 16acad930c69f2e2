"""A run folder: its committed steps, the lock of the one job that writes in it, and the leftovers of dead jobs."""
