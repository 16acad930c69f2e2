"""The backends that compute steps on a rank, and the sampler."""
