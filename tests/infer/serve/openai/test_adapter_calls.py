"""Adapters over HTTP: models with a parent, and loaded below one folder only, by operators."""

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.infer.serve.openai.adapter_calls import folder_below
from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import Answer, HttpServerThread

BODY = {"model": "sql", "prompt": "hi"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two adapters."""
    for name in ("one", "two"):
        (tmp_path / "root" / name / "step-00000001").mkdir(parents=True)
        (tmp_path / "root" / name / "step-00000001" / "weights").write_text("")
    return tmp_path / "root"


@pytest.fixture
def loading(engine: FakeEngine, root: Path) -> Iterator[HttpServerThread]:
    server = HttpServerThread(engine, http_port=0, adapter_root=root)
    yield server
    server.close()


def load(server: HttpServerThread, name: str, path: object, **more: object) -> Answer:
    return server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def test_an_adapter_is_a_model_with_a_parent(
    server: HttpServerThread, engine: FakeEngine, client: openai.OpenAI
) -> None:
    refused = server.ask("/v1/completions", BODY)
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    engine.adapters.load("sql", Path("/one"))
    base, adapter = server.ask("/v1/models").json["data"]
    assert (base["id"], base["parent"], base["step"]) == ("fake", None, 7)
    assert (adapter["id"], adapter["parent"], adapter["step"]) == ("sql", "fake", 5)
    assert adapter["adapter_sha256"] == "sha256 of one"
    assert client.models.retrieve("sql").id == "sql"
    answer = client.completions.create(model="sql", prompt="hi")
    assert (answer.model, answer.system_fingerprint) == ("sql", "step-7-adapter-sha256 of one")
    assert client.completions.create(model="fake", prompt="hi").system_fingerprint == "step-7"
    chunks = list(client.completions.create(model="sql", prompt=["hi", "ho"], stream=True))
    assert {chunk.model for chunk in chunks} == {"sql"}
    assert [each.adapter for each in engine.requests] == ["sql", "", "sql", "sql"]


def test_adapters_are_loaded_and_unloaded_as_by_vllm(loading: HttpServerThread, root: Path) -> None:
    answer = load(loading, "sql", root / "one")
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'sql' added successfully.")
    again = load(loading, "sql", "two")
    assert (again.status, again.error["param"]) == (400, "lora_name")
    assert "'sql' has already been loaded" in again.error["message"]
    assert load(loading, "sql", "two", load_inplace=True).status == 200
    assert loading.ask("/v1/models/sql").json["adapter_sha256"] == "sha256 of two"
    assert loading.ask("/v1/completions", BODY).status == 200
    answer = loading.ask("/v1/unload_lora_adapter", {"lora_name": "sql", "lora_int_id": None})
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'sql' removed successfully.")
    gone = loading.ask("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert (gone.status, gone.error["code"]) == (404, "model_not_found")


def test_wrong_calls_are_refused_by_field(loading: HttpServerThread, engine: FakeEngine) -> None:
    for body, param in (
        ({"lora_path": "one"}, "lora_name"),
        ({"lora_name": "sql"}, "lora_path"),
        ({"lora_name": "sql", "lora_path": "one\0"}, "lora_path"),
        ({"lora_name": "sql", "lora_path": "one", "load_inplace": 1}, "load_inplace"),
        ({"lora_name": "sql", "lora_path": "one", "rank": 1}, "rank"),
        ({"lora_name": "fake", "lora_path": "one"}, "lora_name"),
    ):
        answer = loading.ask("/v1/load_lora_adapter", body)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert load(loading, "sql", "missing").error["code"] == "failed_precondition"
    assert engine.adapters.infos == ()


def test_paths_that_lead_out_of_the_folder_are_refused(
    loading: HttpServerThread, root: Path, tmp_path: Path, engine: FakeEngine
) -> None:
    outside = tmp_path / "root-of-another"
    (outside / "one").mkdir(parents=True)
    (root / "out").symlink_to(outside)
    (root / "two" / "latest").symlink_to(outside / "one")
    for path in ("..", ".", "../root-of-another/one", outside / "one", root / "out" / "one", "out", "two", "/"):
        answer = load(loading, "sql", path)
        assert (answer.status, answer.error["param"]) == (400, "lora_path"), path
        assert "leads out of the folder" in answer.error["message"]
    assert engine.adapters.infos == ()
    (root / "inside").symlink_to(root / "one")
    assert load(loading, "sql", "../root/inside").status == 200
    assert folder_below(root, "inside") == Path(os.path.realpath(root / "one"))


def test_loading_needs_a_folder_and_the_role_admin(engine: FakeEngine, root: Path, tmp_path: Path) -> None:
    callers = {"one": Caller("alice", frozenset({GENERATE})), "two": Caller("ops", frozenset({ADMIN}))}
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(line_of(token_digest(token), caller) for token, caller in callers.items()))
    server = HttpServerThread(engine, http_port=0, tokens=tokens)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "sql"} | ({"lora_path": str(root / "one")} if "unload" not in path else {})
        answers = [server.ask(path, body, {"authorization": f"Bearer {token}"}) for token in ("three", *callers)]
        assert [each.status for each in answers] == [401, 403, 404 if "unload" in path else 403]
    assert (
        "without --adapter-root"
        in server.ask("/v1/load_lora_adapter", {}, {"authorization": "Bearer two"}).error["message"]
    )
    server.close()


def test_a_token_may_allow_some_adapters_only(engine: FakeEngine, tmp_path: Path) -> None:
    callers = {"one": Caller("alice", frozenset({GENERATE}), 1, frozenset({"sql"})), "two": Caller("bob")}
    (tmp_path / "tokens").write_text("".join(line_of(token_digest(token), each) for token, each in callers.items()))
    for name in ("sql", "legal"):
        engine.adapters.load(name, Path("/one"))
    server = HttpServerThread(engine, http_port=0, tokens=tmp_path / "tokens")
    for token, legal, listed in (("one", 403, ["fake", "sql"]), ("two", 200, ["fake", "sql", "legal"])):
        bearer = {"authorization": f"Bearer {token}"}
        answers = [server.ask("/v1/completions", BODY | {"model": name}, bearer) for name in ("fake", "sql", "legal")]
        assert [each.status for each in answers] == [200, 200, legal]
        assert [each["id"] for each in server.ask("/v1/models", headers=bearer).json["data"]] == listed
        unknown = server.ask("/v1/completions", BODY | {"model": "other"}, bearer)
        known = f"ask for {' or '.join(map(repr, listed))}."
        for answer in (unknown, server.ask("/v1/models/other", headers=bearer)):
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
            assert answer.error["message"].endswith(known), answer.error["message"]
    assert [each.adapter for each in engine.requests] == ["", "sql", "", "sql", "legal"]
    server.close()
