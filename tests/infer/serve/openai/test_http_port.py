"""What the port says of the model, its state and its load, and who may ask for it."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from tk.core.errors import Overloaded
from tk.infer.engine.schedule.statistics import EngineLoad
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread
from tk.text.tokenizer_files import TextFiles

BODY = {"model": "fake", "prompt": "hi"}


def test_the_load_is_that_of_the_engine(server: HttpServerThread, engine: FakeEngine) -> None:
    engine.statistics.load_now = EngineLoad(running=3, waiting=2, blocks_total=64, blocks_used=16, blocks_free=48)
    load = server.ask("/load").json
    assert (load["state"], load["running"], load["waiting"]) == ("serving", 3, 2)
    assert (load["blocks_used"], load["blocks_total"]) == (16, 64)
    assert load["decode_tokens_per_second"] == 0.0
    server.start(server.server.drain()).result(20)
    assert server.ask("/load").json["state"] == "draining"


def test_metrics_count_the_requests_of_the_port(server: HttpServerThread, engine: FakeEngine) -> None:
    assert server.ask("/v1/completions", BODY).status == 200
    engine.refusal = Overloaded("the queue is full", 1.0)
    assert server.ask("/v1/completions", BODY).status == 429
    answer = server.ask("/metrics")
    assert (answer.status, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
    lines = answer.body.decode().splitlines()
    assert 'tk_request_success_total{finished_reason="length",model_name="fake"} 1.0' in lines
    assert 'tk_request_rejections_total{model_name="fake",status="RESOURCE_EXHAUSTED"} 1.0' in lines
    assert 'tk_e2e_request_latency_seconds_count{model_name="fake"} 1.0' in lines
    openmetrics = server.ask("/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.body.endswith(b"# EOF\n")


def test_load_and_metrics_are_for_operators(engine: FakeEngine, tmp_path: Path) -> None:
    callers = {"one": Caller("alice", frozenset({GENERATE})), "two": Caller("ops", frozenset({ADMIN}))}
    lines = [line_of(token_digest(token), caller) for token, caller in callers.items()]
    (tmp_path / "tokens").write_text("".join(lines))
    server = HttpServerThread(engine, http_port=0, tokens=tmp_path / "tokens")
    for path in ("/load", "/metrics"):
        statuses = [server.ask(path, headers={"authorization": f"Bearer {token}"}).status for token in ("one", "two")]
        assert [server.ask(path).status, *statuses] == [401, 403, 200]
    server.close()


def test_the_model_says_whether_it_takes_conversations(server: HttpServerThread, engine: FakeEngine) -> None:
    assert server.ask("/v1/models/fake").json["has_chat_template"] is False
    other = HttpServerThread(engine, http_port=0)
    assert engine.tokenizer is not None
    engine.tokenizer.files = TextFiles(Path("a folder"), {"chat_template.jinja": b"{{ messages }}"})
    [model] = other.ask("/v1/models").json["data"]
    assert model["has_chat_template"] is True
    other.close()


def test_each_name_of_the_model_is_listed_and_may_be_asked_for(server: HttpServerThread, engine: FakeEngine) -> None:
    names = ("first", "org/second: é", "third")
    engine.info = replace(engine.info, name=names[0], aliases=names[1:], created=1_700_000_000)
    listed = server.ask("/v1/models").json["data"]
    assert [(model["id"], model["created"], model["step"]) for model in listed] == [
        (name, 1_700_000_000, 7) for name in names
    ]
    for name in names:
        assert server.ask(f"/v1/models/{quote(name)}").json["id"] == name
        answer = server.ask("/v1/completions", BODY | {"model": name})
        assert (answer.status, answer.json["model"]) == (200, "first"), "answers have the first one"
    for path in ("/v1/models/", "/v1/models/fake"):
        assert (server.ask(path).status, server.ask(path).error["code"]) == (404, "model_not_found")
    refused = server.ask("/v1/completions", BODY)
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert "'first' or 'org/second" in refused.error["message"]
