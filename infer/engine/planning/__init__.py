"""Before a model is loaded: the checkpoint to serve, its dtypes, and the memory of every rank."""
