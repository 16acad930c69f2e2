"""The certificates of a server as a context of Python's ssl, which follows changed files as the gRPC port does."""

import logging
import ssl
from typing import Final

from ....core.errors import ConfigError
from ..access.tls import Certificates

_LOG: Final = logging.getLogger(__name__)


def tls_context(files: Certificates) -> ssl.SSLContext:
    """Returns a context whose connections have the files' content at the time of their handshake.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together.
    """
    current = _Current(files)
    current.context.sni_callback = current.use_newest
    return current.context


class _Current:
    """The context made of the files as last read."""

    def __init__(self, files: Certificates) -> None:
        self._files = files
        self._versions = self._stat()
        self.context = self._newest = _made(files)

    def use_newest(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Gives a connection the newest certificate that could be read; OpenSSL calls it in each handshake."""
        try:
            if (versions := self._stat()) != self._versions:
                self._newest, self._versions = _made(self._files), versions
                _LOG.info("read the certificate in %s again", self._files.cert)
        except (OSError, ConfigError) as error:
            _LOG.error("the certificates read before stay in use: %s", error)
        if self._newest is not self.context:
            connection.context = self._newest

    def _stat(self) -> list[tuple[int, int, int]]:
        paths = [path for path in (self._files.cert, self._files.key, self._files.client_ca) if path is not None]
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in (path.stat() for path in paths)]


def _made(files: Certificates) -> ssl.SSLContext:
    files.check()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.cert, files.key)
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
