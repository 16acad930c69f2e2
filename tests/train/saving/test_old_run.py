"""A run that commit 28dfdd7 wrote at tp 2 x dp 2, ZeRO 1: its step is resumed, and the same seed writes it again."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tk.checkpoint import Checkpoint
from tk.core.config import parse
from tk.tests.rank_pool import RankPool
from tk.tests.train.run_training import make_trainer
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

OLD: Final = Path(__file__).parent / "old_run"
STEP: Final = "step-00000002"
LOSSES: Final = (5.561290502548218, 5.491850137710571, 5.408869743347168)  # of steps 1 to 3, as 28dfdd7 logged them


def config_of(folder: Path, **parallel: int) -> dict[str, Any]:
    return {
        "model": {
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
        "data": {"sources": [{"path": str(OLD / "tokens")}], "tokenizer": str(OLD / "tokens")},
        "train": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2, "seq_len": 16, "log_every": 1},
        "optimizer": {"lr": 1e-2, "warmup_steps": 1},
        "parallel": parallel,
        "zero": {"stage": 1},
        "checkpoint": {"dir": str(folder), "every": 2, "keep": 0},
    }


def train(config: dict[str, Any]) -> None:
    """Trains on this rank to the end."""
    make_trainer(config).fit()


def losses_in(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def files_in(step: Path) -> dict[str, bytes]:
    return {str(path.relative_to(step)): path.read_bytes() for path in sorted(step.rglob("*")) if path.is_file()}


def header(data: bytes) -> bytes:
    """Returns the header of a safetensors file."""
    return data[: 8 + int.from_bytes(data[:8], "little")]


def without_checksums(part: bytes) -> str:
    """Returns the JSON of a part without the checksums of its values, whose last bits are the CPU's own."""
    return re.sub(r'"crc":\[[\d,]+\]', "", part.decode())


def test_a_step_of_an_earlier_version_is_whole_and_resumed(tmp_path: Path) -> None:
    shutil.copytree(OLD / "run", tmp_path / "run")
    assert Checkpoint.open(tmp_path / "run").verify().ok
    losses: list[float] = []
    config = parse(config_of(tmp_path / "run"), TrainConfig, "test")
    state = Trainer(config, on_step=lambda step, result: losses.append(result.loss)).fit()
    assert (state.step, state.tokens, state.samples) == (3, 192, 12)
    assert losses == [pytest.approx(LOSSES[2], rel=1e-6)]


def test_the_same_seed_writes_the_same_bytes_and_the_values_of_an_earlier_version(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        rank_pool.run(train, 4, config=config_of(folder, tp=2, dp=2))
        assert losses_in(folder) == pytest.approx(LOSSES, rel=1e-6)
    assert losses_in(folders[0]) == losses_in(folders[1])
    one, two = (files_in(folder / STEP) for folder in folders)
    assert one == two
    old = files_in(OLD / "run" / STEP)
    assert one.keys() == old.keys()
    for name in old.keys() - {"COMMIT", "manifest.json"}:
        if name.endswith(".safetensors"):
            assert header(one[name]) == header(old[name]), name
            assert len(one[name]) == len(old[name]), name
        elif name.startswith("parts/"):
            assert without_checksums(one[name]) == without_checksums(old[name]), name
        else:
            assert one[name] == old[name], name
    before, now = Checkpoint.open(OLD / "run" / STEP), Checkpoint.open(folders[0] / STEP)
    assert {**before.resume, "loss_scale": {}} == now.resume  # it was 1 where there was none
    assert before.chunks.keys() == now.chunks.keys()
    for tensor, slot in before.chunks:
        expected = before.read(tensor, slot=slot).numpy()  # the order of sums is the CPU's own
        np.testing.assert_allclose(now.read(tensor, slot=slot).numpy(), expected, rtol=1e-3, atol=1e-6)
