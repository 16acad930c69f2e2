"""The certificates of a server as credentials of gRPC, which follow changed files."""

import logging
from typing import Final

import grpc

from ....core.errors import ConfigError
from ..access.tls import Certificates

_LOG: Final = logging.getLogger(__name__)


def server_credentials(files: Certificates) -> grpc.ServerCredentials:
    """Returns the credentials of a port. Changed files take effect with the next connection.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together.
    """
    current = _CurrentFiles(files)
    return grpc.dynamic_ssl_server_credentials(
        current.configuration, current.fetch, require_client_authentication=files.client_ca is not None
    )


class _CurrentFiles:
    """The certificates as last read."""

    def __init__(self, files: Certificates) -> None:
        files.check()
        self._files = files
        self._contents = self._read()

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key, client_ca = self._contents
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
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
