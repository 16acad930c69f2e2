"""The options of a server, its addresses and its open files; without gRPC, so that errors in them come first."""

import errno
import ipaddress
import logging
import re
import resource
import socket
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Final

from ...core.errors import ConfigError
from .access.tls import Certificates
from .access.tokens import parse_tokens, read_text

MAX_CONNECTIONS: Final = 2048  # of a port
_OWN: Final = 96  # the log, libraries, ports, the template's process, and connections that are taken only to be refused
_OF_RANK: Final = 8  # a worker's, and those of the one that is loaded beside it
_ORIGIN: Final = re.compile(r"https?://[^/?#@\s]+", re.IGNORECASE)
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server.

    Attributes:
        host: the address or name to listen on; without `insecure`, one that only this machine reaches.
        port: the port to listen on; 0 = any free port.
        admin_port: the port of the service Admin, 0 = any free port; None = that of Generation.
        health_port: the port on which health answers without encryption, 0 = any free port; None = none.
        metrics_port: the port on which Prometheus reads metrics over HTTP, 0 = any free port; None = no metrics.
        metrics_host: its address; without `insecure`, one that only this machine reaches: it asks for no token.
        http_port: the port of HTTP (see infer/serve/openai/), 0 = any free port; None = there is none.
        drain_timeout: the time, in seconds, for live requests to end after the server receives a signal.
        default_max_new_tokens: the limit for requests that set none; None = up to the model's length.
        insecure: whether to listen on an address that other machines reach, without encryption or authentication.
        certificates: the certificates of TLS; None = connections are not encrypted.
        tokens: the file of the callers' tokens (see access/tokens.py); None = every caller may make every call.
        log_prompts: whether the log, and spans, have the prompts of requests.
        max_connections: the largest number of connections of a port at a time.
        cors_origins: the sites, beside the server's own, whose pages may ask over HTTP: https://chat.example, for one.
        adapter_root: the folder below which adapters may be loaded over HTTP; None = over HTTP none may.
        otlp_endpoint: the address of an OpenTelemetry collector, to which spans go by OTLP; None = there are none.
    """

    _: KW_ONLY
    host: str = "127.0.0.1"
    port: int = 50051
    admin_port: int | None = None
    health_port: int | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    http_port: int | None = None
    drain_timeout: float = 30.0
    default_max_new_tokens: int | None = None
    insecure: bool = False
    certificates: Certificates | None = None
    tokens: Path | None = None
    log_prompts: bool = False
    max_connections: int = MAX_CONNECTIONS
    otlp_endpoint: str | None = None
    adapter_root: Path | None = None
    cors_origins: tuple[str, ...] = ()

    def validate(self) -> None:
        """Checks all options.

        Raises:
            ConfigError: a value is wrong; the message names the first one.
        """
        for name in ("port", "admin_port", "health_port", "http_port", "metrics_port"):
            port = getattr(self, name) or 0
            if not 0 <= port < 1 << 16:
                raise ConfigError(f"{name} = {port}; it must be 0 (any free port) to 65535.")
        if self.admin_port and self.admin_port == self.port:
            raise ConfigError(f"admin_port and port are both {self.port}; leave admin_port out to have one port.")
        if self.http_port and self.http_port in (self.port, self.admin_port):
            raise ConfigError(f"http_port = {self.http_port} is the port of gRPC; HTTP needs its own.")
        if self.health_port and self.health_port in (self.port, self.admin_port, self.http_port):
            raise ConfigError(
                f"health_port = {self.health_port} is another port of this server too; the one for probes, without "
                "encryption, needs a number of its own."
            )
        if self.host.count(":") == 1:
            host, _, port = self.host.partition(":")
            raise ConfigError(f"host = {self.host!r} holds a port; give the two apart: --host {host} --port {port}.")
        if self.drain_timeout < 0:
            raise ConfigError(f"drain_timeout = {self.drain_timeout:g}; it must be 0 seconds or more.")
        if self.default_max_new_tokens is not None and self.default_max_new_tokens < 1:
            raise ConfigError(f"default_max_new_tokens = {self.default_max_new_tokens}; it must be 1 or more.")
        if self.certificates is not None:
            self.certificates.check()
        if self.tokens is not None:
            parse_tokens(read_text(self.tokens), self.tokens)
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin = {origin!r} is no site; it must be as browsers write it, https://chat.example or "
                    "http://localhost:3000, without a path."
                )
        if self.adapter_root is not None and not self.adapter_root.is_dir():
            raise ConfigError(f"adapter_root = {self.adapter_root} is no folder; name the one that has the adapters.")
        if self.metrics_port is not None and not self.insecure and not is_loopback(self.metrics_host):
            raise ConfigError(
                f"metrics_host = {self.metrics_host!r} can be reached from other machines, and metrics are not "
                "encrypted and need no token. Use 127.0.0.1, or accept the risk with --insecure."
            )
        missing = [
            name
            for name, value in (("--tls-cert and --tls-key", self.certificates), ("--tokens", self.tokens))
            if value is None
        ]
        if missing and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"host = {self.host!r} can be reached from other machines, and {' and '.join(missing)} "
                f"{'is' if missing == ['--tokens'] else 'are'} missing. Give both, listen on 127.0.0.1 behind a proxy, "
                "or accept the risk with --insecure."
            )


def within_open_files(options: ServerOptions, callers: int, tp: int) -> ServerOptions:
    """Returns the options with as many connections as this process may have open files, whose limit it raises.

    Args:
        callers: the number of requests that the engine takes at a time.
        tp: the number of workers.

    Raises:
        ConfigError: there is no room for a connection to each port.
    """
    others = options.admin_port, options.health_port, options.http_port, options.metrics_port
    ports = 1 + sum(port is not None for port in others)
    return replace(options, max_connections=connections_per_port(ports, callers, tp))


def connections_per_port(ports: int, callers: int, tp: int) -> int:
    """Returns the most connections of each port, so that the descriptors do not run out; logs if these are few.

    The limit of this process's open files is raised as far as it may, until every port could have the most connections
    that a port takes; with few, every caller should at least have a connection to every port.

    Args:
        ports: the number of the server's ports.
        callers: the number of requests that it takes at a time, each of which may come by a connection of its own.
        tp: the number of its workers.

    Raises:
        ConfigError: no port could have a connection.
    """
    own = _OWN + _OF_RANK * tp
    needed = own + ports * min(callers, MAX_CONNECTIONS)
    limit = raised_limit(own + ports * MAX_CONNECTIONS)
    room = (limit - own) // ports
    if room < 1:
        raise ConfigError(
            f"This process may have {limit} open files (ulimit -n), and the server needs {own + ports} to take one "
            f"connection on each port. Allow {needed}, for the callers that its limits ask for."
        )
    if limit < needed:
        _LOG.warning(
            "%d open files (ulimit -n) are few: each of %d ports takes at most %d connections, and max_running and "
            "max_queued allow %d callers; allow %d open files, or lower max_queued",
            *(limit, ports, room, callers, needed),
        )
    return min(room, MAX_CONNECTIONS)


def raised_limit(wanted: int) -> int:
    """Raises the limit of this process's open files as far as it may and as is wanted; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    raised = wanted if hard == resource.RLIM_INFINITY else max(soft, min(hard, wanted))
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised


def check_address(options: ServerOptions) -> None:
    """Checks that the server can listen on its ports, so that an error comes before the model is loaded.

    Raises:
        ConfigError: an address is in use or not available.
    """
    ports = {"port": options.port, "admin-port": options.admin_port, "health-port": options.health_port}
    places = {name: (options.host, port or 0) for name, port in (ports | {"http": options.http_port}).items()}
    if options.metrics_port is not None:
        places["metrics-port"] = options.metrics_host, options.metrics_port
    for name, (host, port) in places.items():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            raise not_ours(address_of(host, port), error, f"--{name}") from error


def address_of(host: str, port: int) -> str:
    """Returns HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def not_ours(address: str, error: Exception, option: str = "") -> ConfigError:
    """Returns the error for an address, HOST:PORT, on which the server cannot listen.

    Args:
        option: the option that gives the port, where that is known.
    """
    number = getattr(error, "errno", None)
    where = f"{address} ({option})" if option else address
    if number == errno.EADDRNOTAVAIL:
        return ConfigError(f"Cannot listen on {where}: this machine has no such address. Check --host.")
    if number == errno.EACCES:
        return ConfigError(f"Cannot listen on {where}: ports below 1024 are the system's. Name another port.")
    if number is None:  # gRPC's error has no number
        reason = "the port is in use by another process, or the address is not this machine's"
    else:
        reason = "the port is in use by another process" if number == errno.EADDRINUSE else str(error)
    return ConfigError(
        f"Cannot listen on {where}: {reason}. End that process, or name another port"
        + (f"; {option} 0 takes a free one." if option else ".")
    )


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
