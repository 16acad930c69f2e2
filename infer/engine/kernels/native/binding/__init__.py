"""The compiled library from Python: how it is loaded, its structures, and memory that it reads."""
