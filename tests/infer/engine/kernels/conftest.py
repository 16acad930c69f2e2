"""What tests of backends share."""

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The engine's end of a socket, and the rank's."""
    engine, rank = socket.socketpair()
    engine.settimeout(60)
    with engine, rank:
        yield engine, rank
