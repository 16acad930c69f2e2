"""The policy of every step: which sequences run, on which blocks, and what the ranks compute. Plain Python."""
