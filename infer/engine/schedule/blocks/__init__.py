"""The blocks of the KV cache: their allocator, and the tables of sequences."""
