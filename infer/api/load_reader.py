"""The load of a running server, by Admin.GetLoad."""

from types import TracebackType
from typing import Any, Self

import grpc

from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from .credentials import Credentials
from .remote_errors import error_from_rpc


class LoadReader:
    """A connection to the service Admin of a server, usable as a context manager.

    Args:
        target: the server's address, HOST:PORT.
        credentials: the token and certificates.
        timeout: the largest number of seconds that a look may take.
    """

    def __init__(self, target: str, credentials: Credentials, timeout: float) -> None:
        self._target, self._metadata, self._timeout = target, credentials.metadata, timeout
        self._channel = credentials.channel(target)
        self._stub: Any = pb_grpc.AdminStub(self._channel)

    def read(self) -> dict[str, Any]:
        """Returns the fields of the message Load by name; `state` is a word in lower case, as "serving".

        Raises:
            TkError: the server does not answer, or refuses; see `error_from_rpc`.
        """
        try:
            load = self._stub.GetLoad(pb.GetLoadRequest(), timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._target) from None
        fields = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
        known = pb.State.DESCRIPTOR.values_by_number.get(load.state)
        state = f"state {load.state}" if known is None else known.name.removeprefix("STATE_").lower()
        return fields | {"state": state}

    def close(self) -> None:
        """Closes the connection; a second call does nothing."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
