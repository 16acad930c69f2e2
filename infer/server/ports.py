"""The ports of a server: gRPC servers with the limits and keepalive of this one, on addresses of its options."""

from collections.abc import Sequence
from typing import Final

import grpc

from .access.callers import Callers
from .access.guard import Guard
from .lifecycle.health import HEALTH_SERVICE, Health
from .options import ServerOptions, not_ours
from .reflection import add_reflection
from .request.request_log import RequestLog
from .request.response_size import MAX_RESPONSE_BYTES

MAX_REQUEST_BYTES: Final = 4 << 20
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.so_reuseport", 0),  # two servers on one port are a mistake, which must fail at once
    # By default gRPC closes the connection, and every call on it, of a client that pings during a long decode.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client whose machine has failed does not close its connection: pings detect it, so that its requests end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def make_port(callers: Callers, health: Health, services: Sequence[str], log: RequestLog) -> grpc.aio.Server:
    """Returns a server with health and reflection that does not listen yet; the caller adds `services`, full names."""
    server = grpc.aio.server(interceptors=[Guard(callers, log)], options=_CHANNEL_OPTIONS)
    health.add_to(server)
    add_reflection(server, (*services, HEALTH_SERVICE))
    return server


def make_health_port(health: Health) -> grpc.aio.Server:
    """Returns a server with nothing but health, which does not listen yet."""
    server = grpc.aio.server(options=_CHANNEL_OPTIONS)
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
