"""The processes that compute, one per tensor-parallel rank, and their messages."""
