"""The backend of C kernels for CPUs: packed weights, and a whole step in one call without torch."""
