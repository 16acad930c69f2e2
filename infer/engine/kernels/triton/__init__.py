"""The GPU backend of a lowered program: Triton kernels beside cuBLAS."""
