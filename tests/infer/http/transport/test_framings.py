"""Random framings to the HTTP port: no request runs that a strict parser does not find in the same bytes."""

import logging
import socket
from collections import defaultdict
from pathlib import Path

import pytest

from tk.infer.server.access.tokens import GENERATE, Caller, line_of, token_digest
from tk.tests.infer.http.http_server import HttpServerThread
from tk.tests.infer.http.transport.framings import Framings, judged
from tk.tests.infer.server.fake_engine import FakeEngine


@pytest.mark.parametrize(("seed", "count"), [(1, 250), pytest.param(2, 5000, marks=pytest.mark.matrix)])
def test_what_runs_is_what_a_strict_parser_finds(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int, count: int
) -> None:
    (tmp_path / "tokens").write_text(line_of(token_digest("mine"), Caller("mallory", frozenset({GENERATE}))))
    server = HttpServerThread(engine, http_port=0, tokens=tmp_path / "tokens")
    framings, sent = Framings(seed, "mine", "localhost"), dict[str, bytes]()
    with caplog.at_level(logging.INFO, "tk.infer.server.request.request_log"):
        for number in range(count):
            data = sent[f"m{number}m"] = framings.stream(f"m{number}m")
            with server.connect(data) as connection:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
    server.close()
    ran = defaultdict[str, list[str]](list)
    for record in caplog.records:
        fields = record.__dict__.get("fields", {})
        if "/v1/models/m" in fields["method"]:
            ran[fields["method"].split("/v1/models/")[1].split("-")[0]].append(fields["method"])
            assert fields["principal"] in ("mallory", "")
    for name, data in sent.items():
        found = [each.call for each in judged(data)]
        assert ran[name] == found[: len(ran[name])], data
    assert sum(map(len, ran.values())) > count / 4, "many are requests"
    assert sum(not ran[name] for name in sent) > count / 4, "and many are none"
