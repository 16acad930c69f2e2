"""Broken configurations: `tk plan`, `tk train --dry-run` and `tk train` refuse each alike, and no rank is started.

What another machine may have, data and memory, is a note of `tk plan` instead, with the words of the refusal.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tk.cli.main import main
from tk.data.tokenizer_training import train_byte_level_bpe
from tk.model.config import ModelConfig
from tk.tests.cli.test_plan import write_hugging_face
from tk.tests.train.conftest import Configure
from tk.tests.train.planning.small_models import MODELS
from tk.train.launch import launcher

OTHER_MACHINE: Final = True


@dataclass(frozen=True)
class Case:
    """A broken configuration.

    Attributes:
        change: sections over those of a run that starts, with {0} for the folder of `Files`.
        code: the exit code.
        message: a part of the refusal.
        noted: whether `tk plan` notes it, since another machine may be different.
    """

    change: dict[str, dict[str, Any]]
    code: int
    message: str
    noted: bool = False


def source(path: str) -> dict[str, Any]:
    return {"data": {"sources": [{"path": path}]}}


def tokenizer(path: str) -> dict[str, Any]:
    return {"data": {"tokenizer": path}}


def init(path: str) -> dict[str, Any]:
    return {"model": {"init": path}}


STDLIB: Final = {"sources": "stdlib", "tokenizer": None}
MIXTRAL: Final = {"architecture": "mixtral", "num_local_experts": 65536, "num_hidden_layers": 10000}
CASES: Final[dict[str, Case]] = {
    "source, absent": Case(
        source("{0}/nowhere"), 2, "nowhere does not exist. It must be a token folder", OTHER_MACHINE
    ),
    "source, empty": Case(source(""), 2, "the path is empty"),
    "source, a file": Case(source("{0}/file"), 2, "file is a file. It must be a token folder"),
    "source, another folder": Case(source("{0}/folder"), 2, "folder is not a token folder"),
    "source, damaged": Case(source("{0}/damaged"), 2, "meta.json"),
    "source, cut": Case(source("{0}/cut"), 2, "tokens.bin"),
    "source, without its tokenizer": Case(
        {"data": {"sources": [{"path": "{0}/bare"}], "tokenizer": None}}, 3, "Cannot read the tokenizer"
    ),
    "tokenizer, absent": Case(tokenizer("{0}/nowhere"), 3, "[data] tokenizer: ", OTHER_MACHINE),
    "tokenizer, empty": Case(tokenizer(""), 2, "the path is empty"),
    "tokenizer, a file": Case(tokenizer("{0}/file"), 3, "Cannot read the tokenizer"),
    "tokenizer, another folder": Case(tokenizer("{0}/folder"), 3, "Cannot read the tokenizer"),
    "tokenizer, damaged": Case(tokenizer("{0}/bad-tokenizer"), 3, "is damaged"),
    "tokenizer, not the data's": Case(tokenizer("{0}/other-tokenizer"), 2, "was not made with the tokenizer in"),
    "init, absent": Case(init("{0}/nowhere"), 3, "[model] init: "),
    "init, empty": Case(init(""), 2, "the path is empty"),
    "init, a file": Case(init("{0}/file"), 3, "[model] init: "),
    "init, another folder": Case(init("{0}/folder"), 3, "[model] init: "),
    "init, of fewer tokens": Case(init("{0}/small-model"), 2, "more than the vocabulary of 200 of [model] init"),
    "vocabulary, too small": Case({"model": {"vocab_size": 300}}, 2, "has 301 tokens, more than [model] vocab_size"),
    "cache, empty": Case({"data": STDLIB | {"cache": ""}}, 2, "the path is empty"),
    "cache, a file": Case({"data": STDLIB | {"cache": "{0}/file"}}, 2, "[data] cache"),
    "stdlib, vocabulary": Case(
        {"data": STDLIB | {"cache": "{0}/nowhere"}, "model": {"vocab_size": 300}}, 2, "has 4096 tokens, more than"
    ),
    "run folder, empty": Case({"checkpoint": {"dir": ""}}, 2, "the path is empty"),
    "folder of offload, a file": Case(
        {"offload": {"optimizer": "disk", "folder": "{0}/file"}}, 2, "file is a file, and must be a folder"
    ),
    "run folder, a file": Case({"checkpoint": {"dir": "{0}/file"}}, 2, "file is a file, and must be a folder"),
    "run folder, below a file": Case(
        {"checkpoint": {"dir": "{0}/file/run"}}, 2, "file is a file, and must be a folder"
    ),
    "rows, longer than the model's": Case({"train": {"seq_len": 10**9}}, 2, "exceeds model.max_position_embeddings"),
    "rows, longer than the data": Case(
        {"train": {"seq_len": 10**6}, "model": {"max_position_embeddings": 10**6}}, 2, "fewer than one row"
    ),
    "batch, too many passes": Case({"train": {"global_batch_size": 10**12}}, 2, "passes per rank and step"),
    "micro-batch, too large": Case(
        {"train": {"global_batch_size": 10**9, "micro_batch_size": 10**9}}, 2, "and this machine has", OTHER_MACHINE
    ),
    "hidden size, too large": Case({"model": {"hidden_size": 10**12}}, 2, "less than or equal to"),
    "layers, too many": Case({"model": {"num_hidden_layers": 10**9}}, 2, "less than or equal to"),
    "experts, too many": Case({"model": MIXTRAL}, 2, "tensors; tk has a limit of"),
    "vocabulary, too large": Case({"model": {"vocab_size": 2**28}}, 2, "and this machine has", OTHER_MACHINE),
    "tp, too large": Case({"parallel": {"tp": 10**9}}, 2, "1,000,000,000 ranks are more than the limit"),
    "pp, more than layers": Case({"parallel": {"pp": 5}}, 2, "5 x 1 = 5 stages need"),
    "dp, too large": Case({"parallel": {"dp": 10**6}}, 2, "and this machine has", OTHER_MACHINE),
    "stages, too many": Case({"parallel": {"num_virtual_stages": 10**9, "schedule": "gpipe"}}, 2, "passes per rank"),
}


@pytest.fixture
def files(tmp_path: Path, corpus: Path) -> Path:
    """A folder with things that are not what a configuration takes them for."""
    folder = tmp_path / "files"
    for name in ("folder", "bad-tokenizer"):
        (folder / name).mkdir(parents=True)
    (folder / "file").write_text("text")
    (folder / "bad-tokenizer" / "tokenizer.json").write_text("{}")
    for name in ("damaged", "cut", "bare"):
        shutil.copytree(corpus / "tokens", folder / name)
    meta = folder / "damaged" / "meta.json"
    meta.write_text(meta.read_text().replace("uint16", "uint32"))
    with (folder / "cut" / "tokens.bin").open("r+b") as file:
        file.truncate(1000)
    (folder / "bare" / "tokenizer.json").unlink()
    train_byte_level_bpe(iter(["other text " * 50]), 270, folder / "other-tokenizer")
    write_hugging_face(folder / "small-model", ModelConfig(**MODELS["llama"] | {"vocab_size": 200}))
    return folder


def with_folder(value: Any, folder: Path) -> Any:
    """Returns plain data with the folder in place of {0}."""
    return json.loads(json.dumps(value).replace("{0}", str(folder)))


@pytest.mark.parametrize("name", CASES)
def test_a_broken_configuration_is_refused_alike_before_ranks_start(
    name: str,
    files: Path,
    tmp_path: Path,
    configure: Configure,
    write_toml: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    monkeypatch.setattr(launcher, "Launcher", None)  # a call of it is an error
    config = configure(**with_folder(case.change, files))
    if "init" in config["model"]:
        config["model"] = {"init": config["model"]["init"]}
    path = str(write_toml(config))
    shown = {}
    for words in ("plan", "train --dry-run", "train"):
        code = main([*words.split(), path])
        out, error = capsys.readouterr()
        if case.noted and words == "plan":
            assert code == 0, error
            shown[words] = out
        else:
            assert (code, out) == (case.code, ""), error
            shown[words] = error
        assert case.message in shown[words]
    assert shown["train"] == shown["train --dry-run"]
    if case.noted:
        refusal = shown["train"].removeprefix("error: ").partition(" Use ")[0].strip()
        assert f"note       {refusal}" in shown["plan"]
    else:
        assert shown["plan"] == shown["train"]
    assert not (tmp_path / "run").exists(), "nothing is written"
