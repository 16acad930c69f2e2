"""Buffers that forward changes: saved as they are now, and the same on every rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import ConfigError, ShapeMismatch
from tk.tests.rank_pool import RankPool
from tk.train import initialize


class Running(nn.Module):
    """Makes a buffer anew in each forward pass, writes another through `.data`, and has one that is a view."""

    count: torch.Tensor
    moving: torch.Tensor
    newest: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("newest", torch.zeros(3))
        self.register_buffer("moving", torch.zeros(3))
        self.register_buffer("wide", torch.arange(3).expand(2, 3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.linear(x))
        if self.training:
            self.newest = x.mean(0)
            self.moving.data.mul_(0.5).add_(0.5 * x[0])
            self.count = self.count + 1
            self.scratch = x.sum(1)
        loss: torch.Tensor = out.square().mean() + out.sum() * self.newest.sum()
        return loss


def _x(number: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_buffer_made_anew_is_saved_and_loaded(tmp_path: Path, zero: Any) -> None:
    module = Running()
    engine = initialize(module, zero=zero)
    for step in range(2):
        engine.backward(engine(_x(step)))
        engine.step()
    engine.save(tmp_path / "run", wait=True)
    saved = Checkpoint.open(tmp_path / "run")
    assert torch.equal(saved.read("newest").torch(), _x(1).mean(0))
    assert saved.read("count").numpy() == 2
    assert "scratch" not in saved.tensors
    other = Running()
    other(_x(7))  # it holds objects of its own by now
    again = initialize(other, zero=zero)
    other(_x(8))
    again.load(tmp_path / "run")
    for name, value in module.named_buffers():
        if name != "scratch":
            assert torch.equal(other.get_buffer(name), value), name


def drift(folder: str) -> dict[str, Any]:
    """Two steps on data of this rank's own, saved; returns its values then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = Running()
    module.scratch = torch.full((1,), float(rank))
    engine = initialize(module, {"lr": 1e-9}, accumulate=2)
    given = float(module.scratch)
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(_x(step * 100 + micro * world + rank)))
            engine.step()
    engine.save(folder, wait=True)
    names = ("norm.running_mean", "norm.running_var", "newest", "moving", "count")
    return {"given": given} | {name: module.get_buffer(name).tolist() for name in names}


def test_ranks_that_saw_other_data_agree_on_the_mean(rank_pool: RankPool, tmp_path: Path) -> None:
    """Of a running mean that is the one of a process with all data (arXiv 1502.03167 takes means of batches)."""
    first, second = rank_pool.run(drift, 2, folder=str(tmp_path / "run"))
    assert first == second
    assert first["given"] == 0, "rank 0's values count, also of buffers that are not saved"
    assert first["count"] == 4
    np.testing.assert_allclose(first["newest"], torch.stack([_x(102), _x(103)]).mean((0, 1)), rtol=1e-6)
    running: dict[str, Any] = {}
    for rank in range(2):
        module = Running()
        for step in range(2):
            for micro in range(2):
                module.norm(module.linear(_x(step * 100 + micro * 2 + rank)))
        for name in ("running_mean", "running_var"):
            running[name] = running.get(name, 0) + module.norm.get_buffer(name) / 2
    np.testing.assert_allclose(first["norm.running_mean"], running["running_mean"], rtol=1e-5)
    np.testing.assert_allclose(first["norm.running_var"], running["running_var"], rtol=1e-5)
    saved = Checkpoint.open(tmp_path / "run")
    for name in ("norm.running_mean", "moving"):
        assert saved.read(name).numpy().tolist() == first[name]


class Growing(nn.Linear):
    """Its buffer grows in each forward pass."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x[:1, 0]])
        return super().forward(x)


def test_a_buffer_that_grows_ends_the_first_step() -> None:
    engine = initialize(Growing())
    engine.backward(engine(_x(0)).sum())
    with pytest.raises(ConfigError, match=r"buffer seen was F32 \[1\].*\[2\] now.*persistent=False"):
        engine.step()


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    module = Running()
    initialize(module).save(tmp_path / "run", wait=True)
    fewer, wider, narrow = Running(), Running(), Running()
    del fewer.moving
    wider.register_buffer("more", torch.ones(1))
    narrow.register_buffer("count", torch.tensor(0, dtype=torch.int32))
    for other, message in (
        (fewer, "has moving, which"),
        (wider, "lacks more, which"),
        (narrow, "count is I64, and I32"),
    ):
        with pytest.raises(ShapeMismatch, match=message):
            initialize(other).load(tmp_path / "run")
