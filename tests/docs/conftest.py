"""The folder in which blocks run, built once for all pages."""

import pytest

from tk.tests.docs.world import World, build


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A demo of few steps and a reader's own files; a test runs what it shows in a copy."""
    return build(tmp_path_factory.mktemp("world"))
