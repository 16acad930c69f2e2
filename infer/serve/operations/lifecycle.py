"""The states of a server, from the opening of its port to its end, and what follows of it."""

import enum
from collections.abc import Callable

from ....core.errors import WorkerDied, WorkerStalled
from ..errors import Draining, Loading


class ServerState(enum.Enum):
    """What a server does; the names are those of the enum State on the wire."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    RECOVERING = "recovering"
    FAILED = "failed"
    STALLED = "stalled"


class Lifecycle:
    """The state of one server; only the event loop's thread uses it.

    Args:
        on_change: is called with the state at each change, to show it to probes.
    """

    def __init__(self, on_change: Callable[[ServerState], None] = lambda state: None) -> None:
        self._on_change = on_change
        self._is_loaded = self._is_draining = False
        self._death: WorkerDied | None = None

    @property
    def state(self) -> ServerState:
        """The state now. A server that drains does so until its end, unless its workers are dead for good."""
        if self.death is not None:
            return ServerState.FAILED
        if self._is_draining:
            return ServerState.DRAINING
        if not self._is_loaded:
            return ServerState.LOADING
        if self._death is None:
            return ServerState.SERVING
        return ServerState.STALLED if isinstance(self._death, WorkerStalled) else ServerState.RECOVERING

    @property
    def death(self) -> WorkerDied | None:
        """The error of the worker that died, if none starts again; else None."""
        error = self._death
        may_go_on = error is None or error.retry_after is not None or isinstance(error, WorkerStalled)
        return None if may_go_on else error

    @property
    def retry_after(self) -> float | None:
        """The seconds after which dead workers have started again; None if none are starting."""
        return None if self._death is None else self._death.retry_after

    def check_loaded(self) -> None:
        """Raises Loading before the model is loaded."""
        if not self._is_loaded:
            raise Loading("The server is loading the model; try again later, or watch its health.")

    def check_admitting(self) -> None:
        """Checks that new requests are taken; dead workers are the engine's to report.

        Raises:
            Draining: the server takes no new requests.
            Loading: the model is not loaded yet.
        """
        if self._is_draining:
            raise Draining("The server is draining and takes no new requests; ask another one.")
        self.check_loaded()

    def set_loaded(self) -> None:
        """Records that requests can be answered from now on."""
        self._is_loaded = True
        self._on_change(self.state)

    def set_draining(self) -> None:
        """Records that no new requests are taken from now on."""
        self._is_draining = True
        self._on_change(self.state)

    def set_death(self, error: WorkerDied | None) -> None:
        """Records that workers are dead, for good or, with `retry_after`, until they have started; or that they stall.

        Args:
            error: the reason; None = they compute.
        """
        self._death = error
        self._on_change(self.state)
