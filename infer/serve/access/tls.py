"""The certificates of a server and of its clients (mutual TLS), which can be replaced while it serves."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....core.errors import ConfigError

if TYPE_CHECKING:
    import grpc

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

    def credentials(self) -> "grpc.ServerCredentials":
        """Returns the credentials of a port. Changed files take effect with the next connection.

        Raises:
            ConfigError: see `check`.
        """
        import grpc

        current = _CurrentFiles(self)
        return grpc.dynamic_ssl_server_credentials(
            current.configuration, current.fetch, require_client_authentication=self.client_ca is not None
        )


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


class _CurrentFiles:
    """The certificates as last read."""

    def __init__(self, files: Certificates) -> None:
        files.check()
        self._files = files
        self._contents = self._read()

    @property
    def configuration(self) -> "grpc.ServerCertificateConfiguration":
        import grpc

        cert, key, client_ca = self._contents
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)

    def fetch(self) -> "grpc.ServerCertificateConfiguration | None":
        """Returns the configuration if the files have changed, else None; gRPC asks before each handshake.

        While files are replaced, one after the other, they do not belong together: then the ones before stay in use.
        """
        try:
            contents = self._read()
            if contents == self._contents:
                return None
            self._files.check()
        except (OSError, ConfigError) as error:
            _LOG.error("the certificates read before stay in use: %s", error)
            return None
        self._contents = contents
        _LOG.info("read the certificate in %s again", self._files.cert)
        return self.configuration

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        files = self._files
        client_ca = None if files.client_ca is None else files.client_ca.read_bytes()
        return files.cert.read_bytes(), files.key.read_bytes(), client_ca


def _no_password() -> str:
    """Returns no password: without this OpenSSL asks for one on the terminal, and a server would wait for ever."""
    return ""
