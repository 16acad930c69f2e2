"""Dense tensors and experts in one engine: sums over each family's ranks, norm, updates and drift of replicas."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tk.core.errors import TkError
from tk.core.layout import Layout
from tk.core.local_params import LocalParam, local_params
from tk.core.tensors import Split, TensorSpec
from tk.parallel.collectives import all_reduce
from tk.parallel.mesh import Mesh
from tk.parity.flat_values import Values, square_differences
from tk.tests.rank_pool import RankPool
from tk.train.config.sections import OptimizerSection, PrecisionSection
from tk.train.engine.training_engine import TrainingEngine, TrainingOptions
from tk.train.saving.replica_check import ReplicaCheck
from tk.train.saving.snapshot import Snapshot
from tk.train.zero.parameter_gather import Unit

NUM_EXPERTS, STEPS = 4, 2
OPTIMIZER = OptimizerSection(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip=0.5)
EXPERT: tuple[tuple[str, tuple[int, ...], Split | None], ...] = (
    ("gate", (4, 6), Split(0)),
    ("down", (4, 6), Split(1)),
    ("scale", (6,), None),
)
TABLE = (
    TensorSpec("first.embed", (8, 6), Split(0), "first"),
    *(
        spec
        for layer in range(2)
        for spec in (
            TensorSpec(f"{layer}.norm", (6,), None, layer),
            TensorSpec(f"{layer}.up", (8, 6), Split(0), layer),
            *(
                TensorSpec(f"{layer}.{name}{expert}", shape, split, layer, expert=expert)
                for expert in range(NUM_EXPERTS)
                for name, shape, split in EXPERT
            ),
        )
    ),
    TensorSpec("last.norm", (6,), None, "last"),
)
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 2, "ep": 2},
    {"dp": 2, "cp": 2, "ep": 2, "shard_size": 2},
    {"tp": 4, "expert_tp": 2},
]
MORE_LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 2, "ep": 4},
    {"dp": 4, "ep": 2, "expert_tp": 2},
    {"pp": 2, "cp": 2, "ep": 2},
    {"tp": 2, "cp": 2, "ep": 2, "expert_tp": 2},
]


class Added(nn.Module):
    """Adds products of its parameters and given numbers to its input, so that these are the gradients."""

    def forward(self, total: torch.Tensor, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the sum, a scalar; `factors` are those of each parameter, by name."""
        for name, parameter in self.named_parameters():
            total = total + (parameter * factors[name]).sum()
        return total


def _number(name: str) -> int:
    return [spec.name for spec in TABLE].index(name)


def _drawn(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Returns random values of a whole tensor; the first ones for seed 0, the gradients of ranks for others."""
    generator = torch.Generator().manual_seed(1000 * seed + _number(spec.name))
    return torch.randn(spec.shape, generator=generator)


def _local(param: LocalParam, seed: int) -> torch.Tensor:
    """Returns a rank's part of `_drawn`."""
    parts = [_drawn(piece.tensor, seed)[piece.box.slices].reshape(-1) for piece in param.pieces]
    return torch.cat(parts).view(param.shape)


def _fill(param: LocalParam, into: torch.Tensor) -> None:
    into.copy_(_local(param, 0))


def _gradient_seed(step: int, holder: int) -> int:
    return 1 + 16 * step + holder


class Rank:
    """One rank's engine on the tensors that it holds.

    Args:
        layout: the layout of all ranks.
    """

    def __init__(self, layout: Layout) -> None:
        self.mesh = Mesh.build(layout, 64, timeout_seconds=60)
        self.params = local_params(TABLE, layout, self.mesh.world.rank)
        self.module = nn.ModuleDict()
        for param in self.params:
            unit, _, name = param.name.partition(".")
            if unit not in self.module:
                self.module[unit] = Added()
            self.module[unit].register_parameter(name, nn.Parameter(torch.empty(param.shape, device="meta")))
        self.engine = TrainingEngine(
            (self.module,),
            TABLE,
            self.mesh,
            TrainingOptions(OPTIMIZER, PrecisionSection()),
            device=torch.device("cpu"),
            fill=_fill,
        )
        if layout.zero == 3:
            self.engine.gather_around([list(self._units())], prefetch=True)

    def _units(self) -> Iterator[Unit]:
        for name, module in self.module.items():
            mine = [bucket for bucket in self.engine.buffers.buckets if str(bucket.plan.params[0].unit) == name]
            yield Unit(mine, [module])

    def step(self, number: int) -> float:
        """Makes a step; returns the gradient norm."""
        layout, rank = self.mesh.layout, self.mesh.world.rank
        factors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.module}
        for param in self.params:
            spread = layout.dense if param.pieces[0].tensor.expert is None else layout.experts
            unit, _, name = param.name.partition(".")
            factors[unit][name] = _local(param, _gradient_seed(number, spread.place(rank).data))
        self.engine.begin_step()
        total = torch.zeros((), requires_grad=True)
        for unit, module in self.module.items():
            total = module(total, factors[unit])
        self.engine.end_pass(0)
        self.engine.begin_backward(0, last=True)
        total.backward()
        self.engine.end_pass(0)
        self.engine.gradients_arrived(0, last=True)
        norm = float(all_reduce(self.engine.finish_backward(), self.mesh.world).sqrt())
        self.engine.update(OPTIMIZER.lr, norm)
        return norm


def _alone(layout: Layout) -> tuple[list[float], Values]:
    """Returns the norms and the final values of torch's AdamW on the whole tensors, with the sums of all gradients."""
    whole = {spec.name: nn.Parameter(_drawn(spec, 0)) for spec in TABLE}
    decayed = [value for value in whole.values() if value.dim() >= 2]
    others = [value for value in whole.values() if value.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    norms = []
    for step in range(STEPS):
        for spec in TABLE:
            spread = layout.dense if spec.expert is None else layout.experts
            drawn = [_drawn(spec, _gradient_seed(step, holder)) for holder in range(spread.data)]
            whole[spec.name].grad = torch.stack(drawn).sum(0)
        norms.append(float(nn.utils.clip_grad_norm_(whole.values(), 0.5)))
        optimizer.step()
    return norms, torch.cat([whole[spec.name].detach().flatten() for spec in TABLE]).numpy()


def train(layout: dict[str, Any]) -> list[list[float]]:
    """Trains at every ZeRO stage; returns the relative errors of the norms, and the largest one of the values."""
    errors = []
    for zero in range(4):
        at = Layout(**layout, zero=zero, bucket_size=100)
        rank = Rank(at)
        norms, values = _alone(at)
        found = [rank.step(number) for number in range(STEPS)]
        runs = rank.engine.optimizer.runs("master")
        distances = square_differences(runs, rank.engine.buffers, TABLE, values)
        ReplicaCheck(Snapshot(rank.engine.optimizer), rank.mesh).check(STEPS)
        ratios = [abs(mine / other - 1) for mine, other in zip(found, norms, strict=True)]
        errors.append([*ratios, max(distances.values()) ** 0.5])
    return errors


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.matrix) for layout in MORE_LAYOUTS)],
    ids=lambda layout: " ".join(f"{key}{size}" for key, size in layout.items()),
)
def test_each_family_is_summed_over_its_own_ranks(rank_pool: RankPool, layout: dict[str, Any]) -> None:
    for errors in rank_pool.run(train, 4, layout=layout):
        assert np.max(errors) < 1e-5, errors


def drift(layout: dict[str, Any], zero: int, name: str, slot: str, faulty_rank: int) -> str:
    """Returns the error of the check after one value changed by its last bit on one rank."""
    rank = Rank(Layout(**layout, zero=zero, bucket_size=100))
    rank.step(0)
    snapshot = Snapshot(rank.engine.optimizer)
    if rank.mesh.world.rank == faulty_rank:
        if slot == "weight" and zero < 3:
            values = next(values for piece, values in snapshot.weights.items() if piece.tensor.name == name)
        else:
            runs = rank.engine.optimizer.runs(slot)
            values = next(values for shard, values in runs if shard.piece.tensor.name == name)
        values.view(torch.int32)[3] ^= 1
    with pytest.raises(TkError) as error:
        ReplicaCheck(snapshot, rank.mesh).check(1)
    return str(error.value)


@pytest.mark.parametrize(
    ("layout", "zero", "name", "slot", "rank", "camps"),
    [
        ({"tp": 2, "dp": 2, "ep": 2}, 1, "1.gate0", "weight", 2, "rank 0 / rank 2"),
        ({"tp": 2, "dp": 2, "ep": 2}, 0, "1.down3", "exp_avg", 1, "rank 1 / rank 3"),
        ({"tp": 2, "dp": 2, "ep": 2}, 2, "0.norm", "weight", 1, "ranks 0, 2, 3 / rank 1"),
        ({"cp": 2, "dp": 2, "ep": 2, "shard_size": 2}, 3, "0.gate1", "weight", 2, "rank 0 / rank 2"),
        ({"dp": 4, "ep": 2, "expert_tp": 2}, 1, "0.scale3", "weight", 3, "rank 2 / rank 3"),
    ],
)
def test_drift_of_an_expert_names_the_ranks_that_hold_it(
    rank_pool: RankPool, layout: dict[str, Any], zero: int, name: str, slot: str, rank: int, camps: str
) -> None:
    for message in rank_pool.run(drift, 4, layout=layout, zero=zero, name=name, slot=slot, faulty_rank=rank):
        assert f"have drifted apart in {name}, slot {slot}: " in message
        assert {*camps.split(" / ")} == {*message.split(f"slot {slot}: ")[1].split(" differ")[0].split(" / ")}
