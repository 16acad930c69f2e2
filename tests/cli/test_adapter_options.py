"""Adapters of `tk generate`, `tk eval` and `tk serve`: beside a model, instead of one, and with another base."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.cli.main import main
from tk.infer.engine.options import EngineOptions
from tk.tests.infer.adapters import make_adapter, trained_logits
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread
from tk.text.tokenizer import Tokenizer

ASKED = ("--max-new-tokens", "8", "--temperature", "0", "--json", "--threads", "1", "--kv-memory", "4MiB")


@pytest.fixture(scope="module")
def base(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(model_folder("grouped"), tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("runs") / "sql", base, rank=70, alpha=500.0).parent


def generated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, *ASKED]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_generate_answers_with_an_adapter_of_any_rank_beside_or_instead_of_its_base(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = generated(capsys, str(base), "the other", "--adapter", str(adapter))
    prompt, new = Tokenizer.from_folder(base).encode("the other"), beside["token_ids"]
    expected, others = (
        trained_logits(base, path, [*prompt, *new])[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
        for path in (adapter, None)
    )
    assert new == expected != others
    instead = generated(capsys, str(adapter), "the other")
    assert (instead["token_ids"], instead["adapter_sha256"]) == (new, beside["adapter_sha256"])
    assert (instead["model"]["name"], len(instead["adapter_sha256"])) == ("base", 64)


def test_a_base_that_has_moved_is_named(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = Path(shutil.copytree(base, tmp_path / "moved"))
    lost = make_adapter(tmp_path / "lost", moved).parent
    homeless = Path(shutil.copytree(moved, tmp_path / "again"))
    shutil.rmtree(moved)
    for command in (["generate", str(lost), "x"], ["eval", str(lost), "--data", "x"], ["serve", str(lost)]):
        assert main(command) == 3
        error = capsys.readouterr().err
        assert f"was trained on {moved}, which does not open" in error
        assert "--base CKPT" in error
    assert generated(capsys, str(lost), "the other", "--base", str(homeless))["model"]["name"] == "again"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "BASE", "x", "--base", "BASE"], "--base is for adapters, and BASE holds a model"),
        (["generate", "ADAPTER", "x", "--adapter", "ADAPTER"], "is an adapter itself. Name its base instead"),
        (["generate", "localhost:1", "x", "--base", "BASE"], "--base is for a CKPT"),
        (["serve", "BASE", "--adapter", "sql"], "'sql' is not NAME=CKPT, for example sql=runs/sql"),
        (["serve", "BASE", "--adapter", "a=ADAPTER", "--adapter", "a=ADAPTER"], "--adapter names two adapters alike"),
        (["serve", "BASE", "--adapter", "a=ADAPTER", "--max-adapters", "0"], "max_adapters is 0"),
        (
            ["serve", "BASE", "--adapter", "base=ADAPTER", "--max-adapter-rank", "70"],
            "'base' is the name of the model and of an adapter",
        ),
        (["serve", "BASE", "--adapter-root", "BASE/config.json"], "is no folder"),
    ],
)
def test_wrong_combinations_are_refused(
    base: Path, adapter: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def filled(text: str) -> str:
        return text.replace("BASE", str(base)).replace("ADAPTER", str(adapter))

    assert main([filled(each) for each in arguments]) == 2
    assert filled(words) in capsys.readouterr().err.replace("\n", " ")


def test_eval_measures_the_adapter(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "the other one is there\n" * 4
    (tmp_path / "text").write_text(text)
    ids = Tokenizer.from_folder(base).encode(text)
    logits = trained_logits(base, adapter, ids).astype(np.float64)[:-1]
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    arguments = [str(base), "--adapter", str(adapter), "--data", str(tmp_path / "text"), "--json", "--threads", "1"]
    assert main(["eval", *arguments]) == 0
    [found] = json.loads(capsys.readouterr().out)["results"]
    assert found["loss"] == pytest.approx(-scores[np.arange(len(ids) - 1), ids[1:]].mean(), abs=1e-4)


def test_a_server_is_asked_for_an_adapter_by_its_name(
    server: ServerThread, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.adapters.load("sql", Path("/one"))
    assert main(["generate", server.target, "hi", "--adapter", "sql"]) == 0
    assert capsys.readouterr().out == "abc\n"
    assert [each.adapter for each in engine.requests] == ["sql"]


def test_serve_takes_adapters_by_name(monkeypatch: pytest.MonkeyPatch, base: Path, adapter: Path) -> None:
    seen: list[EngineOptions] = []

    def begin(options: EngineOptions, *more: object) -> None:
        seen.append(options)
        raise SystemExit(9)

    monkeypatch.setattr("tk.infer.engine.engine.Engine.begin", begin)
    beside = [str(base), "--adapter", f"a={adapter}", "--max-adapters", "3"]
    for arguments in (beside, [str(adapter)]):
        with pytest.raises(SystemExit):
            main(["serve", *arguments, "--port", "0"])
    first, second = seen
    assert (first.checkpoint, dict(first.adapters), first.max_adapters) == (base, {"a": adapter}, 3)
    assert (second.checkpoint, dict(second.adapters), second.num_adapters) == (base, {"sql": adapter}, 1)
