"""Parallelism on plain local tensors: process groups, collectives, autograd functions and layers."""
