"""A server over a scripted engine, for commands that talk to one; tiny models and data for those that load them."""

from tk.tests.infer.conftest import model_folder, reference
from tk.tests.infer.serve.conftest import engine, server
from tk.tests.train.conftest import configure, corpus, write_toml

__all__ = ["configure", "corpus", "engine", "model_folder", "reference", "server", "write_toml"]
