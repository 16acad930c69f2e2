"""Encrypted connections: the server's certificate, clients' certificates, and their replacement while it serves.

The certificates hold until 2126; their authority's key was not kept.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.infer.client.client import Client
from tk.infer.client.connection import Credentials, Unavailable
from tk.infer.serve.access.tls import Certificates, certificates_of
from tk.infer.serve.options import ServerOptions
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread

HERE = Path(__file__).parents[1] / "certificates"
CA = HERE / "ca.pem"
Start = Callable[[Certificates], ServerThread]


@pytest.fixture
def start(engine: FakeEngine) -> Iterator[Start]:
    servers: list[ServerThread] = []

    def start(certificates: Certificates) -> ServerThread:
        servers.append(ServerThread(engine, certificates=certificates))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def name_served(server: ServerThread, credentials: Credentials | None) -> str:
    with Client(server.target, timeout=10, max_attempts=1, credentials=credentials) as client:
        return client.model_info().name


def test_a_client_that_trusts_the_authority_is_served(start: Start) -> None:
    server = start(Certificates(HERE / "server.pem", HERE / "server.key"))
    assert name_served(server, Credentials(ca=CA)) == "fake"
    for wrong in (None, Credentials(tls=True), Credentials(ca=HERE / "other-ca.pem")):
        with pytest.raises(Unavailable):
            name_served(server, wrong)


def test_clients_need_a_certificate_where_the_server_names_their_authority(start: Start) -> None:
    server = start(Certificates(HERE / "server.pem", HERE / "server.key", client_ca=CA))
    with pytest.raises(Unavailable):
        name_served(server, Credentials(ca=CA))
    own = Credentials(ca=CA, cert=HERE / "client.pem", key=HERE / "client.key")
    assert name_served(server, own) == "fake"


def test_a_replaced_certificate_serves_new_connections(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Certificates(tmp_path / "cert", tmp_path / "key")
    shutil.copy(HERE / "server.pem", files.cert)
    shutil.copy(HERE / "server.key", files.key)
    server = start(files)
    # Trusting one certificate alone shows which one the server has.
    old, new = Credentials(ca=HERE / "server.pem"), Credentials(ca=HERE / "renewed.pem")
    assert name_served(server, old) == "fake"

    shutil.copy(HERE / "renewed.pem", files.cert)  # its key comes later
    assert name_served(server, old) == "fake"
    assert "stay in use" in caplog.text
    shutil.copy(HERE / "renewed.key", files.key)
    assert name_served(server, new) == "fake"
    with pytest.raises(Unavailable):
        name_served(server, old)

    files.key.unlink()
    assert name_served(server, new) == "fake"


def test_wrong_files_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    server, key = HERE / "server.pem", HERE / "server.key"
    for wrong in (
        Certificates(tmp_path / "absent", key),
        Certificates(server, HERE / "client.key"),
        Certificates(tmp_path / "text", key),
        Certificates(server, key, client_ca=tmp_path / "text"),
        Certificates(server, key, client_ca=tmp_path / "absent"),
    ):
        with pytest.raises(ConfigError, match="cannot be used"):
            ServerOptions(certificates=wrong).validate()


def test_a_certificate_and_its_key_come_together() -> None:
    cert, key = HERE / "server.pem", HERE / "server.key"
    assert certificates_of(None, None, None) is None
    assert certificates_of(cert, key, CA) == Certificates(cert, key, CA)
    for part in ((cert, None, None), (None, key, None), (None, None, CA)):
        with pytest.raises(ConfigError, match="needs --tls-cert and --tls-key"):
            certificates_of(*part)


def test_an_address_that_others_reach_needs_encryption_and_tokens(tmp_path: Path) -> None:
    pair = Certificates(HERE / "server.pem", HERE / "server.key")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice generate {'0' * 64}\n")
    for insufficient, missing in (
        (ServerOptions(host="0.0.0.0"), "--tls-cert and --tls-key and --tokens are missing"),
        (ServerOptions(host="0.0.0.0", tokens=tokens), "--tls-cert and --tls-key are missing"),
        (ServerOptions(host="0.0.0.0", certificates=pair), "--tokens is missing"),
    ):
        with pytest.raises(ConfigError, match=missing):
            insufficient.validate()
    ServerOptions(host="0.0.0.0", certificates=pair, tokens=tokens).validate()
    ServerOptions(host="0.0.0.0", insecure=True).validate()
    with pytest.raises(ConfigError, match="Cannot read the tokens"):
        ServerOptions(tokens=tmp_path / "absent").validate()
