"""Configuration errors: the message names every wrong key or value, and the right ones."""

from pathlib import Path
from typing import Any

import pytest

from tk.core.config import load_toml, parse
from tk.core.errors import ConfigError
from tk.train.config.train_config import TrainConfig

GOOD: dict[str, Any] = {"checkpoint": {"dir": "runs/x"}}


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"stepz": 3}, r"unknown key 'train.stepz'; did you mean 'steps'\?$"),
        ("nonsense", {}, r"unknown key 'nonsense'; known keys: model, data"),
        ("optimizer", {"lr": "fast"}, r"'optimizer.lr' = 'fast': input should be a valid number"),
        ("optimizer", {"lr": float("inf")}, r"'optimizer.lr' = inf: input should be a finite number"),
        ("optimizer", {"betas": 0.9}, r"'optimizer.betas' = 0.9: input should be a valid array"),
        ("optimizer", {"betas": [0.9, 1.5]}, r"both betas must be in \[0, 1\)"),
        ("data", {"sources": "foo"}, r"^test: 'data.sources' = 'foo': 'foo' is a text, not .*path = \"tokens\""),
        ("data", {"sources": [{"pathh": "/x"}]}, r"unknown key 'data.sources.0.pathh'; did you mean 'path'\?"),
        ("data", {"sources": []}, r"'data.sources' = .*no data to train on"),
        ("data", {"sources": [{"path": "a", "weight": 0}]}, r"^test: 'data.sources.0.weight' = 0: [^;]* than 0\.$"),
        ("checkpoint", {"dir": ""}, r"'checkpoint.dir' = '': the path is empty"),
        ("data", {"tokenizer": ""}, r"'data.tokenizer' = '': the path is empty; leave the key out"),
        ("data", {"cache": ""}, r"'data.cache' = '': the path is empty"),
        ("data", {"sources": [{"path": ""}]}, r"'data.sources.0.path' = '': the path is empty"),
        ("model", {"init": ""}, r"'model.init' = '': the path is empty"),
        ("checkpoint", {}, r"'checkpoint.dir' is missing"),
        (
            "model",
            {"hidden_size": 30, "num_attention_heads": 4},
            r"num_attention_heads = 4 must divide hidden_size = 30",
        ),
        ("model", 5, r"'model' = 5: input should be a valid dictionary"),
        ("parallel", {"timeout_seconds": 1e300}, r"less than or equal to 86400"),
    ],
)
def test_wrong_keys_and_values_are_named(section: str, values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(GOOD | {section: values}, TrainConfig, "test")


def test_every_problem_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GOOD | {"train": {"stepz": 3, "seq_len": "x"}}, TrainConfig, "test")
    assert "stepz" in str(caught.value)
    assert "seq_len" in str(caught.value)


def test_overrides_are_toml_values_or_bare_words(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[checkpoint]\ndir = "a"\n[optimizer]\nlr = 1.0\n')
    overrides = ["optimizer.lr=0.5", "parallel.dp=auto", "optimizer.betas=[0.8, 0.9]", 'checkpoint.dir="b"']
    config = load_toml(path, TrainConfig, overrides)
    assert (config.optimizer.lr, config.parallel.dp, config.optimizer.betas) == (0.5, "auto", (0.8, 0.9))
    assert config.checkpoint.dir == "b"
    for wrong in ("optimizer.lr", "=3", "optimizer.lr.x=1"):
        with pytest.raises(ConfigError, match="--set"):
            load_toml(path, TrainConfig, [wrong])


def test_a_byte_order_mark_of_an_editor_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf[checkpoint]\r\ndir = 'run'\r\n")
    assert load_toml(path, TrainConfig).checkpoint.dir == "run"
