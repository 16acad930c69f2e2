"""`initialize` against plain PyTorch: foreign modules at every ZeRO stage, in fp32 and bf16, with accumulation or not.

Each module is trained by two ranks, and by one process with torch's AdamW, which takes every rank's micro-batches in
turn. In bf16 that process has fp32 masters beside bf16 parameters and adds gradients up in fp32. TK_FOREIGN_MATRIX=FILE
runs all combinations and writes their figures as a table; without it a choice runs that covers all pairs of values.
"""

import os
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tk.tests.rank_pool import RankPool
from tk.tests.train.foreign.foreign_modules import SUBJECTS
from tk.train import initialize

LR, RANKS = 1e-3, 2
OPTIMIZER = {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "grad_clip": 1.0}
# Elements whose gradient stays below this share of the model's largest are left out where single tensors are compared:
# attention does not depend on a key's bias, so that its gradient is an error of rounding, and Adam makes steps of it.
NOISE = 1e-4
ROUNDINGS = 4
# Relative distances |a - b| / |b|. "whole" is that of all parameters as one vector, nothing left out; "tensor" that of
# the worst one, where the effect of the order of sums on a small gradient shows more: one whose distance is less than
# ROUNDINGS times that between PyTorch's fp32 and PyTorch's fp64 does not count, nor does such a loss. In bf16 gradients
# are sums of the same bf16 gradients and masters are fp32, so that distances are those of fp32 until a rounding to bf16
# falls the other way: an element of a parameter moves by 2^-8 of itself then, and all gradients of the next step, too.
BOUNDS = {
    "fp32": {"loss": 1e-6, "whole": 1e-6, "tensor": 1e-6, "buffers": 1e-6},
    "bf16": {"loss": 1e-3, "whole": 1e-5, "tensor": 1e-4, "buffers": 1e-3},
}
MATRIX = os.environ.get("TK_FOREIGN_MATRIX", "")
STEPS = 5 if MATRIX else 3
STAGES = (0, 1, 2, 3)


def _cases() -> list[tuple[str, str, int, tuple[int, ...]]]:
    """(subject, precision, accumulate, stages): all, or one of each subject so that all pairs of values meet."""
    if MATRIX:
        return [(*case, STAGES) for case in product(SUBJECTS, ("fp32", "bf16"), (1, 3))]
    return [
        (name, ("fp32", "bf16")[i % 2], (1, 3)[i // 2 % 2], ((i // 4 + i) % 4, (i // 4 + i + 2) % 4)[: 1 + i % 2])
        for i, name in enumerate(SUBJECTS)
    ]


def _make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return SUBJECTS[name].make().train()


def _module(name: str, dtype: torch.dtype) -> nn.Module:
    """As it is given to `initialize`: where torch does not mix dtypes, buffers are the parameters'."""
    return _make(name).to(dtype) if SUBJECTS[name].one_dtype else _make(name)


def _batch(name: str, dtype: torch.dtype, step: int, rank: int, micro: int) -> Any:
    return _cast(SUBJECTS[name].batch(100 * step + 10 * rank + micro), dtype)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {key: _cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_cast(value, dtype) for value in batch)
    return batch.to(dtype) if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch


def _loss(output: Any) -> torch.Tensor:
    """The output's own loss, or its distance to a fixed wave."""
    loss: torch.Tensor = getattr(output, "loss", output)
    if loss.dim() == 0:
        return loss
    return (loss.float() - torch.arange(loss.numel()).cos().view_as(loss)).square().mean()


class Plain:
    """A module trained by one process as RANKS would: masters, and each rank's buffers, which become their mean.

    Masters are fp32; with dtype fp64 they and all arithmetic are fp64.
    """

    def __init__(self, name: str, dtype: torch.dtype, accumulate: int) -> None:
        self.name, self.dtype, self.accumulate = name, dtype, accumulate
        wide = dtype == torch.float64
        self.module = _make(name).double() if wide else _module(name, dtype)
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(dtype)
        self.learning = {key: value for key, value in self.module.named_parameters() if value.requires_grad}
        master_dtype = dtype if wide else torch.float32
        self.masters = {
            key: nn.Parameter(value.detach().to(master_dtype, copy=True)) for key, value in self.learning.items()
        }
        decayed = [value for value in self.masters.values() if value.dim() >= 2]
        others = [value for value in self.masters.values() if value.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.95), eps=1e-6
        )
        self.buffers = [self._copy() for _ in range(RANKS)]
        self.largest = {key: torch.zeros_like(value) for key, value in self.masters.items()}

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.module.named_buffers()}

    def _take(self, buffers: dict[str, torch.Tensor]) -> None:
        for name, value in buffers.items():
            owner, _, last = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[last] = value.clone()

    def step(self, number: int) -> list[float]:
        """The losses, rank by rank."""
        losses = []
        for rank, micro in product(range(RANKS), range(self.accumulate)):
            self._take(self.buffers[rank])
            loss = self._forward(_batch(self.name, self.dtype, number, rank, micro))
            (loss / (RANKS * self.accumulate)).backward()
            self.buffers[rank] = self._copy()
            losses.append(float(loss.detach()))
            for key, parameter in self.learning.items():
                master = self.masters[key]
                if parameter.grad is not None:
                    grad = parameter.grad.to(master.dtype)
                    master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        for key, master in self.masters.items():
            if master.grad is not None:
                self.largest[key] = torch.maximum(self.largest[key], master.grad.abs())
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for key, parameter in self.learning.items():
                parameter.copy_(self.masters[key])
        means = {key: self._mean(key) for key in self.buffers[0]}
        self.buffers = [dict(means) for _ in range(RANKS)]
        return losses

    def _mean(self, key: str) -> torch.Tensor:
        values = torch.stack([buffers[key] for buffers in self.buffers])
        return values.double().mean(0).to(values.dtype) if values.is_floating_point() else values[0]

    def _forward(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            return _loss(self.module(**batch))
        return _loss(self.module(*batch) if isinstance(batch, tuple) else self.module(batch))


def compare(name: str, precision: Any, accumulate: int, stages: list[Any]) -> dict[str, dict[str, float]]:
    """Trains on this rank at each stage; stage -> the differences to plain PyTorch, as BOUNDS names them."""
    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    plain = Plain(name, dtype, accumulate)
    expected = [plain.step(number) for number in range(STEPS)]
    rank, found = dist.get_rank(), {}
    for zero in stages:
        engine = initialize(
            _module(name, dtype), OPTIMIZER, zero=zero, precision=precision, accumulate=accumulate, bucket_size=3000
        )
        worst = 0.0
        for number in range(STEPS):
            for micro in range(accumulate):
                loss = _loss(engine(_batch(name, dtype, number, rank, micro)))
                engine.backward(loss)
                engine.step()
                there = expected[number][rank * accumulate + micro]
                worst = max(worst, abs(float(loss.detach()) - there) / max(abs(there), 1e-2))
        if precision == "fp32" and worst > BOUNDS["fp32"]["loss"] and worst <= ROUNDINGS * _rounding_of_losses(plain):
            worst = 0.0
        found[str(zero)] = {"loss": worst} | _distances(engine, plain)
    return found


def _rounding_of_losses(plain: Plain) -> float:
    """The largest relative distance of the losses of an fp32 training to those of the same training in fp64."""
    runs = [Plain(plain.name, dtype, plain.accumulate) for dtype in (torch.float32, torch.float64)]
    losses: list[list[float]] = [[loss for number in range(STEPS) for loss in run.step(number)] for run in runs]
    return max(float(abs(mine - exact) / max(abs(exact), 1e-2)) for mine, exact in zip(*losses, strict=True))


def _rounding(plain: Plain) -> dict[str, float]:
    """The relative distance of each parameter of an fp32 training to the same training in fp64, noise left out."""
    exact = Plain(plain.name, torch.float64, plain.accumulate)
    for number in range(STEPS):
        exact.step(number)
    found = {}
    for name, value in plain.masters.items():
        heard = _heard(plain, name)
        square = float((value.detach().double() - exact.masters[name].detach())[heard].square().sum())
        found[name] = (square / _scale(value)) ** 0.5
    return found


def _heard(plain: Plain, name: str) -> torch.Tensor:
    """True where a gradient was more than noise."""
    top = max(float(value.max()) for value in plain.largest.values() if value.numel())
    return plain.largest[name] > NOISE * top


def _scale(value: torch.Tensor) -> float:
    """The square of a parameter's norm; where that is near zero, of STEPS updates."""
    return max(float(value.detach().double().square().sum()), value.numel() * (STEPS * LR) ** 2, 1e-30)


def _distances(engine: Any, plain: Plain) -> dict[str, float]:
    """Relative distances: of all parameters together, of the worst tensor (noise left out) and of the worst buffer."""
    copies = RANKS if engine._engine.mesh.layout.zero == 0 else 1
    squares = {key: torch.zeros(2, dtype=torch.float64) for key in plain.masters}
    for shard, values in engine._engine.optimizer.runs("master"):
        name, flat = shard.piece.tensor.name, slice(*shard.flat)
        square = (values.detach().double() - plain.masters[name].detach().view(-1)[flat]).square()
        heard = _heard(plain, name).view(-1)[flat]
        squares[name] += torch.stack([square.sum(), square[heard].sum()]) / copies
    sums = torch.stack(list(squares.values()))
    dist.all_reduce(sums)
    norm = sum(float(value.detach().double().square().sum()) for value in plain.masters.values())
    tensors = {
        name: (float(row[1]) / _scale(value)) ** 0.5
        for row, (name, value) in zip(sums, plain.masters.items(), strict=True)
    }
    if plain.dtype == torch.float32 and max(tensors.values()) > BOUNDS["fp32"]["tensor"]:
        rounding = _rounding(plain)
        tensors = {name: value for name, value in tensors.items() if value > ROUNDINGS * rounding[name]}
    buffers = [
        float(
            (value.double() - plain.buffers[0][name]).norm() / max(float(plain.buffers[0][name].double().norm()), 1e-3)
        )
        for name, value in engine.module.named_buffers()
    ]
    whole = (float(sums[:, 0].sum()) / norm) ** 0.5
    return {"whole": whole, "tensor": max(tensors.values(), default=0.0), "buffers": max(buffers, default=0.0)}


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[tuple[str, str, int], dict[str, dict[str, float]]]]:
    """Collects measurements; the matrix writes them to a page at its end."""
    found: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}
    yield found
    if MATRIX:
        Path(MATRIX).write_text("\n".join(_page(found)) + "\n")


@pytest.mark.every(3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "precision", "accumulate", "stages"), _cases())
def test_trained_as_torch_does(
    rank_pool: RankPool, figures: Any, name: str, precision: str, accumulate: int, stages: tuple[int, ...]
) -> None:
    ranks = rank_pool.run(compare, RANKS, name=name, precision=precision, accumulate=accumulate, stages=stages)
    worst = {stage: {key: max(rank[stage][key] for rank in ranks) for key in ranks[0][stage]} for stage in ranks[0]}
    figures[name, precision, accumulate] = worst
    wrong = {
        stage: {key: value for key, value in found.items() if not value <= BOUNDS[precision][key]}
        for stage, found in worst.items()
    }
    assert not any(wrong.values()), wrong


def test_the_choice_covers_all_pairs() -> None:
    """Of stage, precision and accumulation; every subject is there."""
    cases = [(stage, precision, accumulate) for _, precision, accumulate, stages in _cases() for stage in stages]
    values = (STAGES, ("fp32", "bf16"), (1, 3))
    for left, right in combinations(range(3), 2):
        assert {(case[left], case[right]) for case in cases} == set(product(values[left], values[right]))
    assert {name for name, *_ in _cases()} == set(SUBJECTS)


def _page(figures: dict[tuple[str, str, int], dict[str, dict[str, float]]]) -> Iterator[str]:
    """The table: a line for each module, precision and accumulation, the worst of the four stages in it."""
    yield "| module | precision | accumulate | loss | all parameters | worst tensor | buffers | of ZeRO |"
    yield "|---|---|---|---|---|---|---|---|"
    for (name, precision, accumulate), stages in figures.items():
        worst = {key: max(found[key] for found in stages.values()) for key in BOUNDS[precision]}
        at = max(stages, key=lambda stage: stages[stage]["whole"])
        numbers = " | ".join(f"{value:.0e}" if value else "0" for value in worst.values())
        yield f"| {name} | {precision} | {accumulate} | {numbers} | {at} |"
