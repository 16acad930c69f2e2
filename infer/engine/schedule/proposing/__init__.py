"""Proposals for the next tokens of samples: where they come from, and how many of them a step computes."""
