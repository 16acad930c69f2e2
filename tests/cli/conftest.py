"""A server over a scripted engine, for the commands that talk to one, and tiny models for those that load one."""

from tk.tests.infer.conftest import model_folder, reference
from tk.tests.infer.server.conftest import engine, server

__all__ = ["engine", "model_folder", "reference", "server"]
