"""ZeRO stages 0 to 3 (arXiv 1910.02054) on flat buckets: one code path, beside tensor and pipeline parallelism."""
