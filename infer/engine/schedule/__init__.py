"""The policy of every step: which samples run, on which blocks, and what the step computes. Plain Python."""
