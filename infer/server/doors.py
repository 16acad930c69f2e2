"""The interface of another protocol's port to the same server."""

from typing import Protocol

from .access.callers import Callers
from .request.runner import RequestRunner


class Door(Protocol):
    """A port beside that of gRPC, on the same event loop."""

    async def open(self, runner: RequestRunner, callers: Callers) -> None:
        """Starts to listen, before the model is loaded; raises ConfigError if the address cannot be had."""

    def drain(self) -> None:
        """Ends what is idle; new requests are refused by the runner, and live ones end by themselves."""

    async def stop(self) -> None:
        """Closes the port and ends all connections."""
