"""The interface of another protocol's port to the same server."""

from typing import Protocol

from ..observability.tally import RequestTally
from .access.callers import Callers
from .request.request_log import RequestLog
from .request.runner import RequestRunner


class Door(Protocol):
    """A port beside that of gRPC, on the same event loop."""

    async def open(self, runner: RequestRunner, callers: Callers, log: RequestLog, tally: RequestTally) -> None:
        """Starts to listen, before the model is loaded; raises ConfigError if the address cannot be had.

        Args:
            runner: runs the requests.
            callers: identifies the callers by their tokens.
            log: the log of calls.
            tally: counts the requests of all protocols.
        """

    def drain(self) -> None:
        """Ends what is idle; new requests are refused by the runner, and live ones end by themselves."""

    async def stop(self) -> None:
        """Closes the port and ends all connections."""
