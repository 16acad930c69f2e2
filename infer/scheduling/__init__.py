"""The policy of every step: which sequences run, on which blocks, and the work of the ranks. Plain Python."""
