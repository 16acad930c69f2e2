"""Of a model that is built on meta no rank ever has more in memory than its engine and one unit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tk.benchmarks.bench_meta import CASES, SMALL, MetaCase, measure

TINY: MetaCase = MetaCase("28 M", dict(SMALL) | {"hidden_size": 512, "intermediate_size": 1408}, {"zero": 3})


def _check(case: MetaCase, folder: Path) -> None:
    for figures in measure(case, folder):
        assert figures.built < 2**24, "parameters have memory while the model is built"
        assert figures.unit < figures.resident / 4, "the largest unit is too large to show anything"
        assert figures.peak <= figures.allowed, figures


@pytest.mark.matrix
@pytest.mark.parametrize("case", [TINY, *(case for case in CASES if case.shape == SMALL)], ids=lambda case: case.name)
def test_first_values_of_an_ordinary_construction(tmp_path: Path, case: MetaCase) -> None:
    _check(case, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("world_size", [1, 2])
def test_values_of_a_checkpoint(tmp_path: Path, world_size: int) -> None:
    shape: dict[str, Any] = dict(TINY.shape)
    LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().save_pretrained(tmp_path / "model", max_shard_size="20MB")
    options = {"zero": 3, "precision": "bf16", "weights": str(tmp_path / "model")}
    _check(dataclasses.replace(TINY, options=options, world_size=world_size), tmp_path)
