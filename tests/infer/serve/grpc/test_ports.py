"""The ports of gRPC: addresses in use, the end, and the port of health alone."""

import socket
from pathlib import Path

import grpc
import pytest

from tk.core.errors import ConfigError
from tk.infer.serve.access.tls import Certificates
from tk.infer.serve.access.tokens import Caller, line_of, token_digest
from tk.infer.serve.app import Server
from tk.infer.serve.options import ServerOptions, check_address
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, ServerThread
from tk.tests.infer.serve.grpc.test_health import NOT_SERVING, READINESS, SERVING, check, watch

CERTIFICATES = Path(__file__).parents[1] / "certificates"


def test_stop_closes_the_port(engine: FakeEngine) -> None:
    server = ServerThread(engine)
    host, port = server.target.rsplit(":", 1)
    server.close()
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


def test_a_port_in_use_is_a_config_error(engine: FakeEngine, server: ServerThread) -> None:
    port = int(server.target.rsplit(":", 1)[1])

    async def start() -> None:
        await Server(engine, ServerOptions(port=port)).start()

    in_use = rf"127\.0\.0\.1:{port}.*in use"
    with pytest.raises(ConfigError, match=in_use):
        server.run(start())
    with pytest.raises(ConfigError, match=in_use):
        check_address(ServerOptions(port=port))


def test_probes_without_tls_or_tokens_have_a_port_that_answers_nothing_else(engine: FakeEngine, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of(token_digest("secret"), Caller("alice")))
    certificates = Certificates(
        CERTIFICATES / "server.pem", CERTIFICATES / "server.key", client_ca=CERTIFICATES / "ca.pem"
    )
    server = ServerThread(engine, is_loaded=False, health_port=0, certificates=certificates, tokens=tokens)
    with grpc.insecure_channel(server.server.grpc.health_address) as channel:
        assert (check(channel, ""), check(channel, READINESS)) == (SERVING, NOT_SERVING)
        readiness = watch(channel, READINESS)
        assert next(readiness).status == NOT_SERVING
        server.run(server.server.set_ready())
        assert next(readiness).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            GenerationStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_SECONDS)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        server.run(server.server.drain())
        assert next(readiness).status == NOT_SERVING
        assert (check(channel, ""), check(channel, READINESS)) == (SERVING, NOT_SERVING)
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        check(channel, "")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE, "the port of calls is encrypted"
    server.close()
    with grpc.insecure_channel(server.server.grpc.health_address) as channel, pytest.raises(grpc.RpcError):
        check(channel, "")
