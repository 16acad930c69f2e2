"""HTTPS: the server's certificate, clients' certificates, their replacement, and connections that are no TLS."""

import http.client
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tk.infer.serve.access.tls import Certificates
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread, read_to_end

HERE = Path(__file__).parents[1] / "certificates"
CA = HERE / "ca.pem"
Start = Callable[[Certificates], HttpServerThread]


@pytest.fixture
def start(engine: FakeEngine) -> Iterator[Start]:
    servers: list[HttpServerThread] = []

    def start(certificates: Certificates) -> HttpServerThread:
        servers.append(HttpServerThread(engine, http_port=0, certificates=certificates))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def trusting(authority: Path, own: str = "") -> ssl.SSLContext:
    """The context of a client that trusts one authority, and may have a certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    if own:
        context.load_cert_chain(HERE / f"{own}.pem", HERE / f"{own}.key")
    return context


def status(server: HttpServerThread, context: ssl.SSLContext, host: str = "localhost") -> int:
    connection = http.client.HTTPSConnection(host, server.http_port, timeout=WAIT_SECONDS, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_client_that_trusts_the_authority_is_answered_encrypted(start: Start, engine: FakeEngine) -> None:
    server = start(Certificates(HERE / "server.pem", HERE / "server.key"))
    assert status(server, trusting(CA)) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        status(server, trusting(HERE / "other-ca.pem"))
    with openai.DefaultHttpxClient(verify=trusting(CA), timeout=WAIT_SECONDS) as inner:
        client = openai.OpenAI(base_url=f"https://localhost:{server.http_port}/v1", api_key="none", http_client=inner)
        chunks = list(client.completions.create(model="fake", prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    engine.wait_for(lambda e: e.num_live == 0)


def test_old_versions_and_plain_text_get_nothing(start: Start) -> None:
    server = start(Certificates(HERE / "server.pem", HERE / "server.key"))
    with server.connect(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") as plain:
        assert b"HTTP" not in read_to_end(plain)
    old = trusting(CA)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        status(server, old)
    assert status(server, trusting(CA)) == 200


def test_clients_need_a_certificate_where_the_server_names_their_authority(start: Start) -> None:
    server = start(Certificates(HERE / "server.pem", HERE / "server.key", client_ca=CA))
    assert status(server, trusting(CA, "client")) == 200
    with pytest.raises((ssl.SSLError, ConnectionError)):
        status(server, trusting(CA))


def test_replaced_authorities_of_clients_hold_for_new_connections(start: Start, tmp_path: Path) -> None:
    authorities = tmp_path / "clients"
    shutil.copy(HERE / "other-ca.pem", authorities)
    server = start(Certificates(HERE / "server.pem", HERE / "server.key", client_ca=authorities))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        status(server, trusting(CA, "client"))
    shutil.copy(CA, authorities)
    assert status(server, trusting(CA, "client")) == 200
    with pytest.raises((ssl.SSLError, ConnectionError)):
        status(server, trusting(CA))
    shutil.copy(HERE / "other-ca.pem", authorities)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        status(server, trusting(CA, "client"))


def test_a_replaced_certificate_serves_new_connections(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Certificates(tmp_path / "cert", tmp_path / "key")
    shutil.copy(HERE / "server.pem", files.cert)
    shutil.copy(HERE / "server.key", files.key)
    server = start(files)
    # Trusting one certificate alone shows which one the server has.
    old, new = trusting(HERE / "server.pem"), trusting(HERE / "renewed.pem")
    for context in (old, new):
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    assert status(server, old) == 200
    shutil.copy(HERE / "renewed.pem", files.cert)  # its key comes later
    assert status(server, old) == 200
    assert "stay in use" in caplog.text
    shutil.copy(HERE / "renewed.key", files.key)
    for host in ("localhost", "127.0.0.1"):  # an address is not named in the handshake
        assert status(server, new, host) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            status(server, old, host)
    files.key.unlink()
    assert status(server, new) == 200


def test_a_handshake_that_stops_halfway_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tk.infer.serve.http.listener.TLS_SECONDS", 0.2)
    server = start(Certificates(HERE / "server.pem", HERE / "server.key"))
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT_SECONDS) as silent:
        silent.sendall(b"\x16\x03\x01")
        assert read_to_end(silent) == b""
    assert status(server, trusting(CA)) == 200
