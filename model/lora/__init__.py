"""Low-rank adapters (LoRA, arXiv 2106.09685) of a decoder's linear layers, as plain data without torch."""
