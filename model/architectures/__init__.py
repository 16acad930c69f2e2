"""One small file per architecture: its tensors, named and oriented as its Hugging Face files have them.

Every module here declares one `ARCHITECTURE`; the registry finds it by being here.
"""
