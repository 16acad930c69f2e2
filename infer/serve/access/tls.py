"""The certificates of a server and of its clients (mutual TLS); every port reads them again when they have changed."""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from ....core.errors import ConfigError

T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Certificates:
    """The PEM files of a server.

    Attributes:
        cert: the server's certificate, followed by those between it and its authority.
        key: its private key.
        client_ca: the authorities of clients' certificates; None = clients need no certificate.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Checks that the files can be read and belong together.

        Raises:
            ConfigError: one cannot be read, is no PEM file, or the key is not that of the certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The certificate {self.cert} and the key {self.key} cannot be used: {error}. They must be PEM files "
                "of one pair, the key without a password."
            ) from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError(f"The authorities of clients in {self.client_ca} cannot be used: {error}.") from error


def certificates_of(cert: Path | None, key: Path | None, client_ca: Path | None) -> Certificates | None:
    """Returns the certificates of three optional files; None without any.

    Raises:
        ConfigError: the certificate or its key is missing.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ConfigError("TLS needs --tls-cert and --tls-key, both; --tls-client-ca is in addition to them.")
    return Certificates(cert, key, client_ca)


class CertificateReloader(Generic[T]):
    """What a port makes of certificates, made again when a file has changed.

    While files are replaced, one after the other, they do not belong together: what was made before stays in use.

    Args:
        files: the certificates.
        make: makes it of the files; raises OSError or ConfigError if it cannot.

    Attributes:
        current: what was made last.
    """

    def __init__(self, files: Certificates, make: Callable[[Certificates], T]) -> None:
        self._files, self._make = files, make
        self._versions, self.current = self._stat(), make(files)

    def newest(self) -> T:
        """Returns what the files make now; each handshake asks."""
        try:
            if (versions := self._stat()) != self._versions:
                self.current, self._versions = self._make(self._files), versions
                _LOG.info("read the certificate in %s again", self._files.cert)
        except (OSError, ConfigError) as error:
            _LOG.error("the certificates read before stay in use: %s", error)
        return self.current

    def _stat(self) -> list[tuple[int, int, int]]:
        paths = [path for path in (self._files.cert, self._files.key, self._files.client_ca) if path is not None]
        return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in (path.stat() for path in paths)]


def _no_password() -> str:
    """Returns no password: without this OpenSSL asks for one on the terminal, and a server would wait for ever."""
    return ""
