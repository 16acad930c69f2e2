"""Models of `transformers` over context-parallel ranks: as one process of plain `transformers` with torch's AdamW."""

from pathlib import Path

import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.rank_pool import RankPool
from tk.tests.train.foreign.rows_of_hub_models import BATCHES, MODELS, OPTIMIZER, distances, make, packed
from tk.train import initialize

BOUNDS = (1e-5, 1e-5, 1e-5)  # of losses, gradients and weights
_FEW = [
    ("Llama", "packed", 2, 2, "gather", 3),
    ("Mistral", "whole rows", 2, 2, "ulysses", 0),
    ("Qwen2", "padded", 4, 2, "auto", 0),
    ("Llama of one kv head", "few targets", 4, 4, "ulysses", 3),
]
_ALL = [
    (model, batch, world, cp, mode, zero)
    for model in MODELS
    for batch in BATCHES
    for world, cp in ((2, 2), (4, 4), (4, 2))
    for mode in ("gather", "ulysses")
    for zero in (0, 3)
]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("model", "batch", "world", "cp", "mode", "zero"),
    [*_FEW, *(pytest.param(*row, marks=pytest.mark.matrix) for row in _ALL)],
)
def test_ranks_that_share_rows_train_as_one_process(
    rank_pool: RankPool, model: str, batch: str, world: int, cp: int, mode: str, zero: int
) -> None:
    for found in rank_pool.run(distances, world, model=model, batch=batch, cp=cp, mode=mode, zero=zero):
        assert all(one <= bound for one, bound in zip(found, BOUNDS, strict=True)), found


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.matrix)])
def test_layers_computed_again_find_the_attention_of_their_own_batch(rank_pool: RankPool, zero: int) -> None:
    arguments = {"model": "Mistral", "batch": "packed", "cp": 2, "mode": "gather", "zero": zero}
    for found in rank_pool.run(distances, 2, **arguments, accumulate=2, checkpointing=True):
        assert all(one <= bound for one, bound in zip(found, BOUNDS, strict=True)), found


def save_step(folder: str) -> None:
    """Makes a step of rows that two ranks share, and saves it."""
    engine = initialize(make("Qwen2"), OPTIMIZER, zero=3, cp=2)
    engine.backward(engine(packed(0)))
    assert engine.step()
    engine.save(folder, wait=True)


def test_a_checkpoint_of_shared_rows_goes_on_without_them(rank_pool: RankPool, tmp_path: Path) -> None:
    """Two ranks save; one goes on. It has the weights of a process that was alone from the start, by their names."""
    rank_pool.run(save_step, 2, folder=str(tmp_path))
    alone, again = (initialize(make("Qwen2"), OPTIMIZER) for _ in range(2))
    again.load(tmp_path)
    for engine, steps in ((alone, (0, 1)), (again, (1,))):
        for number in steps:
            engine.backward(engine(packed(number) | {"use_cache": False}))
            engine.step()
    expected, found = alone.state_dict(), again.state_dict()
    assert set(Checkpoint.open(tmp_path).tensors) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
