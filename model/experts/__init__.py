"""Mixtures of experts (arXiv 1701.06538, 2401.04088): the choice of experts, their weights, and their sums."""
