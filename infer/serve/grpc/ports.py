"""The ports of a server: gRPC servers with the limits and keepalive of this one, on addresses of its options."""

from collections.abc import Sequence
from typing import Final

import grpc

from ..access.callers import Callers
from ..call.request_log import RequestLog
from ..call.response_size import MAX_RESPONSE_BYTES
from ..grpc_server import make_grpc_server
from ..health import HEALTH_SERVICE, Health
from ..options import ServerOptions, not_ours
from .guard import Guard
from .reflection import add_reflection

MAX_REQUEST_BYTES: Final = 4 << 20
MAX_PINGS: Final = 1000  # of a connection, less than 10 seconds apart, while the server sends it nothing
MAX_CALLS: Final = 1024  # of a connection at a time
HANDSHAKE_MS: Final = 20_000  # until a connection has encryption and the first frame of HTTP/2
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.so_reuseport", 0),  # two servers on one port are a mistake, which must fail at once
    # By default gRPC closes the connection, and every call on it, of a client that pings during a long decode. Without
    # a bound a flood of pings is answered from memory that grows with it.
    ("grpc.http2.max_ping_strikes", MAX_PINGS),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client whose machine has failed does not close its connection: pings detect it, so that its requests end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Calls wait in one queue until Python takes them. If it is full, gRPC cancels calls of any connection: one that
    # begins and resets streams without a bound would end those of all other clients.
    ("grpc.max_concurrent_streams", MAX_CALLS),
    # Connections that never get on are closed; what they take of the open files meanwhile is bounded in `_options`.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    # By default a connection reads up to some megabytes at once, and a fast flood of frames took the process to 1.9 GB.
    ("grpc.experimental.tcp_max_read_buffer_size", 1 << 18),
)


def make_port(
    callers: Callers, health: Health, services: Sequence[str], log: RequestLog, max_connections: int
) -> grpc.aio.Server:
    """Returns a server with health and reflection that does not listen yet; the caller adds `services`, full names."""
    server = make_grpc_server([Guard(callers, log, services)], _options(max_connections))
    health.add_to(server)
    add_reflection(server, (*services, HEALTH_SERVICE))
    return server


def make_health_port(health: Health, max_connections: int) -> grpc.aio.Server:
    """Returns a server with nothing but health, which does not listen yet."""
    server = make_grpc_server([], _options(max_connections))
    health.add_to(server)
    return server


async def listen(server: grpc.aio.Server, options: ServerOptions, port: int, encrypted: bool = True) -> str:
    """Lets a server listen on a port of the options' host, with their certificates; returns HOST:PORT.

    Args:
        server: the server.
        options: the options.
        port: the port; 0 = any free port.
        encrypted: whether the certificates of the options, if any, are for this port.

    Raises:
        ConfigError: the address is in use or not available.
    """
    address = options.address_of(port)
    try:
        if options.certificates is None or not encrypted:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, options.certificates.credentials())
    except RuntimeError as error:
        raise not_ours(address, error) from error
    await server.start()
    return options.address_of(bound)


def _options(max_connections: int) -> Sequence[tuple[str, int]]:
    return (*_CHANNEL_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections))
