"""One rank of a layout under comparison: trains a few steps and compares first gradients with those of one process."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from ...core.config import parse
from ...core.errors import TkError
from ...core.process import keep_freed_memory
from ...core.tensors import Table
from ...parallel.collectives import all_reduce
from ...parallel.mesh import Mesh
from ..config import TrainConfig
from ..saving.replica_check import ReplicaCheck
from ..trainer import Trainer
from .judge import TOTAL_SHARE
from .rank import Say

BLOCK: Final = 2**20  # elements that are compared at once
Gradients = np.ndarray[Any, np.dtype[np.float32]]


class Measurer:
    """Carries out the pool's jobs; process groups last from one job to the next where the pool says so."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self.store = ""
        self.mesh = Mesh.alone()

    def __call__(self, job: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """Loss, gradient norm and routing of each step; of a layout, the largest difference of a first gradient too."""
        payload = job["payload"]
        config = parse(payload["config"], TrainConfig, "a layout's configuration")
        gradients = Path(payload["gradients"])
        if payload["reference"]:
            return run_reference(config, gradients, say)
        mesh = replace(self._mesh(job, config), layout=config.layout(job["num_ranks"]))
        return run_layout(config, mesh, gradients, say)

    def _mesh(self, job: Mapping[str, Any], config: TrainConfig) -> Mesh:
        if job["store"] != self.store:
            if dist.is_initialized():
                self.mesh = Mesh.alone()
                dist.destroy_process_group()
                gc.collect()  # a group that a cycle of references keeps alive keeps threads that poll
            dist.init_process_group(
                "gloo",
                init_method=f"file://{job['store']}",
                rank=job["rank"],
                world_size=job["num_ranks"],
                timeout=timedelta(seconds=config.parallel.timeout_seconds),
            )
            model, seconds = config.model, config.parallel.timeout_seconds
            layout = config.layout(job["num_ranks"])
            self.mesh = Mesh.build(
                layout, model.num_key_value_heads, model.tie_word_embeddings, timeout_seconds=seconds
            )
            self.store = job["store"]
        return self.mesh


def run_reference(config: TrainConfig, gradients: Path, say: Say) -> dict[str, Any]:
    """Trains in this process alone and leaves its first gradients in `gradients` (fp32, one after another)."""
    trainer = Trainer(config)
    return _train(trainer, say, lambda: np.save(gradients, first_gradients(trainer)))


def run_layout(config: TrainConfig, mesh: Mesh, gradients: Path, say: Say) -> dict[str, Any]:
    """Trains as a rank of `mesh`, and compares.

    Raises:
        TkError: replicas that must be bit-equal are not.
    """
    trainer = Trainer(config, mesh)
    found: dict[str, Any] = {}
    curves = _train(trainer, say, lambda: found.update(compare_gradients(trainer, np.load(gradients, mmap_mode="r"))))
    ReplicaCheck(trainer.snapshot, mesh.world).check(config.train.steps)
    return curves | found


def _train(trainer: Trainer, say: Say, after_first: Callable[[], None]) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": [], "routing": []}
    for stage in trainer.pipeline.stages:
        stage.watch_routing = True
    for step in range(trainer.config.train.steps):
        result = trainer.step()
        curves["loss"].append(result.loss)
        curves["grad_norm"].append(result.grad_norm)
        curves["routing"].append(_routing(trainer))
        if step == 0:
            after_first()
        say({"step": step + 1})
    return curves


def _routing(trainer: Trainer) -> float:
    """The checksum of where all tokens were sent in all layers; 0 without experts."""
    value = torch.zeros((), dtype=torch.float64, device=trainer.device)
    if trainer.mesh.tp.rank == 0:
        value += trainer.pipeline.routing()
    return float(all_reduce(value, trainer.mesh.world))


def _places(table: Table) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where each trained tensor lies in the file of first gradients: elements before it, and its shape."""
    places, start = {}, 0
    for spec in table:
        if spec.trainable and not spec.alias:
            places[spec.name] = (start, spec.shape)
            start += math.prod(spec.shape)
    return places


def first_gradients(trainer: Trainer) -> Gradients:
    """The gradients that a trainer on one process has at hand, as they go into the file: fp32, 1-D."""
    places = _places(trainer.table)
    flat = np.full(sum(math.prod(shape) for _, shape in places.values()), np.nan, np.float32)
    for shard, grads in trainer.engine.buffers.own_runs():
        start, shape = places[shard.piece.tensor.name]
        whole = flat[start : start + math.prod(shape)].reshape(shape)
        box = whole[shard.piece.box.slices]
        values = box.reshape(-1).copy()
        values[slice(*shard.flat)] = grads.numpy()
        box[...] = values.reshape(box.shape)
    return flat


def compare_gradients(trainer: Trainer, expected: Gradients) -> dict[str, Any]:
    """The largest difference over all parameters of this rank's mesh, relative as in `judge.py`, and whose it is.

    Every rank compares what it updates, wherever that lies in the logical tensors; only sums of squares travel.

    Args:
        expected: the reference's first gradients.

    Raises:
        TkError: the ranks' runs together are not every element once.
    """
    places, mesh = _places(trainer.table), trainer.mesh
    number = {name: index for index, name in enumerate(places)}
    sums = torch.zeros(len(places), 2, dtype=torch.float64)  # squared differences, elements
    for shard, grads in trainer.engine.buffers.own_runs():
        if not shard.piece.owner or mesh.replicate.rank:
            continue
        start, shape = places[shard.piece.tensor.name]
        whole = expected[start : start + math.prod(shape)].reshape(shape)
        values = whole[shard.piece.box.slices].reshape(-1)[slice(*shard.flat)]
        squares = square_distance(grads.numpy(), values)
        sums[number[shard.piece.tensor.name]] += torch.tensor([squares, values.size], dtype=torch.float64)
    all_reduce(sums, mesh.world)
    _check_complete(places, sums[:, 1].tolist())
    norms = [math.sqrt(square_distance(expected[start : start + math.prod(shape)])) for start, shape in places.values()]
    ratios = relative_differences(sums[:, 0].sqrt().tolist(), norms)
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    return {"gradients": ratios[worst], "parameter": list(places)[worst]}


def square_distance(values: Gradients, others: Gradients | None = None) -> float:
    """Sum of squares of the differences of 1-D arrays (or of one to zero), in fp64 for a block at a time: parameters
    may be as large as memory allows."""
    total = 0.0
    for start in range(0, values.size, BLOCK):
        difference = values[start : start + BLOCK].astype(np.float64)
        if others is not None:
            difference -= others[start : start + BLOCK]
        total += float(np.square(difference, out=difference).sum())
    return total


def relative_differences(differences: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Each |g - g0| / (|g0| + share |G|), G being all g0 together; infinite for what is no number."""
    total = math.hypot(*norms)
    ratios = (one / (norm + TOTAL_SHARE * total) for one, norm in zip(differences, norms, strict=True))
    return [ratio if math.isfinite(ratio) else math.inf for ratio in ratios]


def _check_complete(places: Mapping[str, tuple[int, tuple[int, ...]]], counts: Sequence[float]) -> None:
    for (name, (_, shape)), count in zip(places.items(), counts, strict=True):
        if count != math.prod(shape):
            raise TkError(
                f"{name}: the ranks compared {count:.0f} elements of its gradient, and it has {math.prod(shape)}."
            )
