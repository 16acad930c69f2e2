"""A client's credentials: its token, and the certificates of an encrypted connection."""

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from ...core.errors import ConfigError

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


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
            return module.insecure_channel(target, options=_OPTIONS)
        ca, key, cert = (None if path is None else _read(path) for path in (self.ca, self.key, self.cert))
        return module.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=_OPTIONS)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from error
