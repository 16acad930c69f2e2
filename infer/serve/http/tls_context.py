"""The certificates of a server as a context of Python's ssl, which follows changed files as the gRPC port does."""

import ssl

from ..access.tls import CertificateReloader, Certificates


def tls_context(files: Certificates) -> ssl.SSLContext:
    """Returns a context whose connections have the files' content at the time of their handshake.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together.
    """
    reloader = CertificateReloader(files, _made)

    def use_newest(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Gives a connection the newest certificate that could be read; OpenSSL calls it in each handshake."""
        if (newest := reloader.newest()) is not context:
            connection.context = newest

    reloader.current.sni_callback = use_newest
    return reloader.current


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
