"""A server over a scripted engine, for the commands that talk to one."""

from tk.tests.infer.server.conftest import engine, server

__all__ = ["engine", "server"]
