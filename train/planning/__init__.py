"""`tk plan`: memory, bubble, traffic and problems of a run, from its configuration alone (no torch)."""
