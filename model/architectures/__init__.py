"""One small file per architecture: its tensors, named and oriented as its Hugging Face files have them."""
