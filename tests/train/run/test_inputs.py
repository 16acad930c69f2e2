"""The inputs of a run: Megatron's files beside token folders, and batches in which nothing is learned."""

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.cli.main import main
from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.data.token_file import TokenFile, TokenFileWriter
from tk.tests.data.test_megatron_file import write
from tk.tests.train.conftest import Configure
from tk.text.tokenizer import Tokenizer
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer


@pytest.fixture
def megatron(corpus: Path, tmp_path: Path) -> Path:
    """The corpus as Megatron's files."""
    tokens = TokenFile(corpus / "tokens")
    documents = [[tokens.read(start, stop).tolist()] for start, stop in pairwise(tokens.document_offsets.tolist())]
    return write(tmp_path / "megatron", documents)


def _train(config: dict[str, Any]) -> list[float]:
    losses: list[float] = []
    Trainer(parse(config, TrainConfig, "test"), on_step=lambda _, result: losses.append(result.loss)).fit()
    return losses


def test_megatrons_files_are_trained_on_as_they_are(configure: Configure, corpus: Path, megatron: Path) -> None:
    sources = [{"path": str(megatron)}, {"path": str(corpus / "tokens"), "weight": 0.5}]
    config = configure(data={"sources": sources}, train={"steps": 15})
    losses = _train(config)
    assert losses[-1] < 0.9 * losses[0]
    saved = Tokenizer.from_folder(Checkpoint.open(Path(config["checkpoint"]["dir"])).path)
    assert saved.sha256 == Tokenizer.from_folder(corpus / "tokenizer").sha256
    with pytest.raises(ConfigError, match=r"megatron does not say which tokenizer .* give \[data\] tokenizer"):
        _train(configure("other", data={"sources": sources, "tokenizer": None}))


def test_missing_data_is_reported_before_any_rank_starts(
    configure: Configure,
    write_toml: Callable[..., Path],
    megatron: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_toml(configure(data={"sources": [{"path": str(tmp_path / "nowhere")}]}))
    assert main(["train", str(path)]) == 2
    assert "or the prefix of Megatron-LM's files" in capsys.readouterr().err


def test_a_batch_of_questions_alone_is_no_nan(configure: Configure, corpus: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(corpus / "tokenizer")
    folder = tmp_path / "questions"
    folder.mkdir()
    with TokenFileWriter(folder, tokenizer, 0) as writer:
        writer.add_example([5] * 1000, [False] * 1000)
        writer.finish()
    losses = _train(configure(data={"sources": [{"path": str(folder)}], "eval_fraction": 0.1}, train={"steps": 2}))
    assert losses == [0.0, 0.0]


def test_truncated_documents_are_counted(
    configure: Configure, examples: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tk")
    data = {"sources": [{"path": str(examples)}], "packing": "documents", "eval_fraction": 0.1}
    _train(configure(data=data, train={"steps": 1, "seq_len": 8}))
    assert "documents are longer than seq_len = 8 and truncated" in caplog.text


def test_speed_counts_computed_tokens_and_separately_learned_ones(
    configure: Configure, examples: Path, tmp_path: Path
) -> None:
    learned: list[int] = []
    config = configure(data={"sources": [{"path": str(examples)}], "eval_fraction": 0.1}, train={"steps": 3})
    parsed = parse(config, TrainConfig, "test")
    Trainer(parsed, on_step=lambda _, result: learned.append(result.num_tokens)).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    computed = parsed.train.global_batch_size * parsed.train.seq_len
    assert all(0 < count < computed for count in learned)
    assert [line["tokens"] for line in steps] == [sum(learned[: number + 1]) for number in range(3)]
    for line, count in zip(steps, learned, strict=True):
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(computed)
        assert line["learned_tokens_per_second"] * line["step_seconds"] == pytest.approx(count)
