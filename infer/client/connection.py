"""The part that all clients of a server share: a channel, and the attempts of a call. It does not import torch."""

import time
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc

from ...core.home_process import HomeProcess
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from .attempts import Attempts
from .credentials import Credentials
from .remote_errors import error_from_rpc


class ServerConnection:
    """A connection to a server.

    If the server is unavailable or its queue is full, a call is repeated after a growing pause, at least as long as the
    server asks, unless the client has already received an event of its answer.

    Args:
        target: the server's address, HOST:PORT.
        timeout: the largest number of seconds that a call may take with all its attempts; None = no limit.
        max_attempts: the largest number of attempts of a call.
        credentials: the token and certificates, for a server that wants them; None = neither.
    """

    _is_asynchronous: ClassVar[bool] = False
    _service: ClassVar[type] = pb_grpc.GenerationStub

    def __init__(
        self,
        target: str,
        *,
        timeout: float | None = None,
        max_attempts: int = 4,
        credentials: Credentials | None = None,
    ) -> None:
        self._home = HomeProcess(f"This {type(self).__name__}")
        credentials = credentials or Credentials()
        self._target, self._timeout, self._max_attempts = target, timeout, max_attempts
        self._metadata = credentials.metadata
        self._channel = credentials.channel(target, self._is_asynchronous)
        self._stub: Any = self._service(self._channel)

    def _attempts(self) -> Attempts:
        """Returns the attempts of a call that begins now.

        Raises:
            ConfigError: another process made this object: gRPC may wait there for ever.
        """
        self._home.require()
        return Attempts(self._max_attempts, self._timeout)

    def _error(self, error: grpc.RpcError) -> Exception:
        return error_from_rpc(error, self._target)

    def _pause(self, error: grpc.RpcError, attempts: Attempts) -> float:
        """Returns the seconds until another attempt makes sense; raises the error if none does."""
        return attempts.pause_after(error_from_rpc(error, self._target))


class BlockingConnection(ServerConnection):
    """A connection for threads, any number of them, and a context manager."""

    def close(self) -> None:
        """Closes the connection and ends the calls in progress; a second call does nothing."""
        if self._home.is_here:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        """Returns the answer to a call; the last attempt's error is raised."""
        attempts = self._attempts()
        while True:
            try:
                return method(request, timeout=attempts.seconds_left, metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(self._pause(error, attempts))
