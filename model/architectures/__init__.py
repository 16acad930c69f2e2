"""One small file per architecture: its tensors, with the names and orientations of its Hugging Face files.

Every module of this package declares one `ARCHITECTURE`, which the registry finds.
"""
