"""The connections to a server that all clients share: their credentials, the attempts of a call, and its errors."""

import random
import time
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import grpc
from google.rpc import error_details_pb2, status_pb2

from ...core.errors import Cancelled, ConfigError, DeadlinePassed, InvalidRequest, Overloaded, TkError
from ...core.given_files import read_given
from ...core.home_process import HomeProcess
from ...proto.v1 import generation_pb2 as pb
from ...proto.v1 import generation_pb2_grpc as pb_grpc
from .reached import advice_for, explained
from .wire import field_from_wire

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_DETAILS_KEY: Final = "grpc-status-details-bin"
FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 5.0
# The part of a pause that is drawn: callers that were refused together must not come back together.
_DRAWN: Final = 0.5


@dataclass(frozen=True)
class Credentials:
    """The credentials of a client.

    Attributes:
        token: the bearer token, for a server with `--tokens`.
        tls: whether the connection is encrypted; a given `ca` or `cert` implies it.
        ca: PEM file of the authorities of the server's certificate; None = those that gRPC knows.
        cert: PEM file of the client's own certificate, for a server with `--tls-client-ca`.
        key: PEM file of its private key.

    Raises:
        ConfigError: only one of `cert` and `key` is given, or the token has characters other than visible ASCII.
    """

    _: KW_ONLY
    token: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError(
                "A client's certificate needs its key, and the key its certificate: give both or neither."
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise ConfigError("The token is empty or has characters that no token has; was a newline copied with it?")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel(self, target: str, asynchronous: bool = False) -> Any:
        """Opens a channel (grpc.Channel, or grpc.aio.Channel) to HOST:PORT.

        Raises:
            ConfigError: a file cannot be read.
        """
        module = grpc.aio if asynchronous else grpc
        if not (self.tls or self.ca or self.cert):
            return module.insecure_channel(target, options=_CHANNEL_OPTIONS)
        ca, key, cert = (None if path is None else _read(path) for path in (self.ca, self.key, self.cert))
        return module.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=_CHANNEL_OPTIONS)


class RemoteError(TkError):
    """A call that a server refused or could not finish.

    Attributes:
        status: the name of the gRPC status, for example "NOT_FOUND".
        retry_after: the number of seconds after which the client should try again, if the server sent it.
    """

    def __init__(self, message: str, status: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Unavailable(RemoteError):
    """A call to an address without a server, or to a server that is draining or has lost a worker."""

    grpc_status = "UNAVAILABLE"


class Attempts:
    """The attempts of one call, which begins now.

    Pauses double from attempt to attempt (exponential backoff with jitter) and are at least as long as the server asks.

    Args:
        most: the largest number of attempts.
        timeout: the seconds that all attempts and pauses together may take; None = no limit.
    """

    def __init__(self, most: int, timeout: float | None) -> None:
        self._left = most
        self._pause = FIRST_PAUSE_SECONDS
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def seconds_left(self) -> float | None:
        """The time until the call must be over, at least 0; None = no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def stop(self) -> None:
        """Makes the present attempt the last one."""
        self._left = 0

    def pause_after(self, error: TkError) -> float:
        """Returns the seconds to wait before the next attempt.

        Raises:
            TkError: the error itself, if no other attempt makes sense: another one would fail too, there were enough,
                or there is no time left for one.
        """
        self._left -= 1
        if self._left < 1 or not isinstance(error, (Overloaded, Unavailable)):
            raise error from None
        drawn = self._pause * (1 - _DRAWN * random.random())
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        asked = error.retry_after or 0.0
        pause = max(drawn, asked + _DRAWN * random.random() * min(asked, FIRST_PAUSE_SECONDS))
        if self._end is not None and time.monotonic() + pause >= self._end:
            raise error from None
        return pause


class ServerConnection:
    """A connection to a server.

    If the server is unavailable or its queue is full, a call is repeated after a growing pause, at least as long as the
    server asks, unless the client has already received an event of its answer.

    Args:
        target: the server's address, HOST:PORT; without a colon it raises ConfigError.
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
        if ":" not in target:
            raise ConfigError(f"{target!r} is no address of a server: write HOST:PORT, as in 127.0.0.1:50051.")
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        """Returns the answer to a call; the last attempt's error is raised."""
        return PendingCall(self, method, request).result()


class PendingCall:
    """A call of a method with one answer in progress."""

    def __init__(self, connection: ServerConnection, method: Any, request: Any) -> None:
        self._connection, self._method, self._request = connection, method, request
        self._attempts = connection._attempts()
        self._begin()

    def result(self) -> Any:
        """Waits for the answer; begins the call again if another attempt makes sense."""
        while True:
            try:
                return self._future.result()
            except grpc.RpcError as error:
                time.sleep(self._connection._pause(error, self._attempts))
            self._begin()

    def cancel(self) -> None:
        """Ends the call."""
        self._future.cancel()

    def _begin(self) -> None:
        seconds, metadata = self._attempts.seconds_left, self._connection._metadata
        self._future = self._method.future(self._request, timeout=seconds, metadata=metadata)


class LoadReader(BlockingConnection):
    """A connection to the service Admin of a server; the arguments are those of `ServerConnection`."""

    _service = pb_grpc.AdminStub

    def read(self) -> dict[str, Any]:
        """Returns the fields of the message Load by name; `state` is a word in lower case, as "serving".

        Raises:
            TkError: the server does not answer, or refuses; see `error_from_rpc`.
        """
        load = self._call(self._stub.GetLoad, pb.GetLoadRequest())
        fields = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
        known = pb.State.DESCRIPTOR.values_by_number.get(load.state)
        state = f"state {load.state}" if known is None else known.name.removeprefix("STATE_").lower()
        return fields | {"state": state}


def error_from_rpc(error: grpc.RpcError, target: str) -> TkError:
    """Rebuilds the error of a status that names its class; other statuses become Unavailable or RemoteError."""
    status: str = error.code().name
    message = f"{target}: {explained(error.details() or status)}"
    details = _details(error)
    retry = details.get("RetryInfo")
    retry_after = retry.retry_delay.ToNanoseconds() / 1e9 if retry else None
    match status:
        case "INVALID_ARGUMENT":
            bad = details.get("BadRequest")
            field = bad.field_violations[0].field if bad else ""
            named = InvalidRequest(error.details() or status, field).renamed(field_from_wire(field))
            return InvalidRequest(f"{target}: {named}", named.field)
        case "RESOURCE_EXHAUSTED" if retry_after is not None:
            return Overloaded(message, retry_after)
        case "CANCELLED":
            return Cancelled(message)
        case "DEADLINE_EXCEEDED":
            return DeadlinePassed(message)
        case "UNAVAILABLE":
            return Unavailable(message, status, retry_after)
    return RemoteError(f"{message} ({status}){advice_for(status)}", status, retry_after)


def _details(error: grpc.RpcError) -> dict[str, Any]:
    """Returns the google.rpc details that the client uses, by name."""
    raw = next((value for key, value in error.trailing_metadata() or () if key == _DETAILS_KEY), b"")
    found: dict[str, Any] = {}
    for packed in status_pb2.Status.FromString(raw).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            detail = kind()
            if packed.Unpack(detail):
                found[kind.DESCRIPTOR.name] = detail
    return found


def _read(path: Path) -> bytes:
    try:
        return read_given(path)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from error
