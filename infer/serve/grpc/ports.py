"""The ports of a server: gRPC servers with the limits and keepalive of this one, on addresses of its options."""

import asyncio
import logging
from collections.abc import Sequence, Set
from typing import Final

import grpc

from ..access.tls import CertificateReloader, Certificates
from ..access.tokens import ADMIN
from ..call.call import Frontend
from ..call.checks import MAX_RESPONSE_BYTES
from ..options import ServerOptions, address_of, not_ours
from .calls import GrpcService, Guard
from .health import HEALTH_SERVICE, Health
from .reflection import add_reflection, known_names
from .server import make_grpc_server

# Seconds for calls other than requests (health watchers, reflection) to end by themselves when no request is live.
STOP_GRACE: Final = 0.5
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
    # Connections that never get on are closed; what they take of the open files meanwhile is bounded in `_listen`.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    # By default a connection reads up to some megabytes at once, and a fast flood of frames took the process to 1.9 GB.
    ("grpc.experimental.tcp_max_read_buffer_size", 1 << 18),
)
_LOG: Final = logging.getLogger(__name__)


class GrpcPorts:
    """The ports of gRPC of a server: that of calls, that of Admin if it has its own, and that of health alone.

    Args:
        options: the options of the server.
        services: the services; those of the role admin are on the port of Admin, if there is one.
        health: the health, which every port answers.

    Attributes:
        address: HOST:PORT of the port of calls, from `open` on.
        health_address: that of the port for health alone; "" if the options have none.
    """

    def __init__(self, options: ServerOptions, services: Sequence[GrpcService], health: Health) -> None:
        self._options, self._services, self._health = options, services, health
        self._servers: list[grpc.aio.Server] = []
        self.address = self.health_address = ""

    @property
    def names(self) -> Set[str]:
        """The names of calls and fields of the services; see `Port`."""
        return known_names(service.description for service in self._services)

    async def open(self, frontend: Frontend) -> None:
        """Starts to listen; see `Port`."""
        options = self._options
        apart = [each for each in self._services if options.admin_port is not None and each.role == ADMIN]
        others = [each for each in self._services if each not in apart]
        self.address = await self._listen(options.port, frontend, others)
        _LOG.info("listening on %s", self.address)
        if options.admin_port is not None:
            _LOG.info("admin on %s", await self._listen(options.admin_port, frontend, apart))
        if options.health_port is not None:
            self.health_address = await self._listen(options.health_port, frontend)
            _LOG.info("health, without encryption, on %s", self.health_address)

    def drain(self) -> None:
        """Does nothing: connections stay, and calls on them are refused by the runner."""

    async def stop(self) -> None:
        """Closes the ports, when calls other than requests have had a moment to end by themselves."""
        await asyncio.gather(*(server.stop(STOP_GRACE) for server in self._servers))

    async def _listen(self, port: int, frontend: Frontend, services: Sequence[GrpcService] = ()) -> str:
        """Lets services and reflection, or health alone, listen on a port of the options' host; returns HOST:PORT."""
        names = [service.description.full_name for service in services]
        guards = [Guard(frontend, names)] if services else []
        most = ("grpc.max_allowed_incoming_connections", self._options.max_connections)
        server = make_grpc_server(guards, (*_CHANNEL_OPTIONS, most))
        self._servers.append(server)
        self._health.add_to(server)
        if services:
            add_reflection(server, (*names, HEALTH_SERVICE))
        for service in services:
            service.add_to(server, frontend)
        address, certificates = address_of(self._options.host, port), self._options.certificates
        try:
            if certificates is None or not services:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, _credentials(certificates))
        except RuntimeError as error:
            raise not_ours(address, error) from error
        await server.start()
        return address_of(self._options.host, bound)


def _credentials(files: Certificates) -> grpc.ServerCredentials:
    """Returns the credentials of a port. Changed files take effect with the next connection."""
    reloader = CertificateReloader(files, _configuration)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        before = reloader.current
        return None if reloader.newest() is before else reloader.current

    return grpc.dynamic_ssl_server_credentials(
        reloader.current, changed, require_client_authentication=files.client_ca is not None
    )


def _configuration(files: Certificates) -> grpc.ServerCertificateConfiguration:
    files.check()
    client_ca = None if files.client_ca is None else files.client_ca.read_bytes()
    return grpc.ssl_server_certificate_configuration([(files.key.read_bytes(), files.cert.read_bytes())], client_ca)
