"""One rank of a layout under comparison: trains a few steps and compares first gradients with those of one process."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..core.config import parse
from ..core.process import keep_freed_memory
from ..parallel.collectives import all_reduce
from ..parallel.mesh import Mesh
from ..train.config.train_config import TrainConfig
from ..train.trainer import Trainer
from . import foreign
from .gradients import compare_gradients, first_gradients
from .rank_loop import Say


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
            reference = foreign.run_reference if payload["foreign"] else run_reference
            return reference(config, gradients, say)
        if payload["foreign"]:
            self._join(job, config)
            return foreign.run_layout(config, gradients, say)
        mesh = replace(self._mesh(job, config), layout=config.layout(job["num_ranks"]))
        return run_layout(config, mesh, gradients, say)

    def _mesh(self, job: Mapping[str, Any], config: TrainConfig) -> Mesh:
        if self._join(job, config):
            model, seconds = config.model, config.parallel.timeout_seconds
            layout = config.layout(job["num_ranks"])
            self.mesh = Mesh.build(
                layout, model.num_key_value_heads, model.tie_word_embeddings, timeout_seconds=seconds
            )
        return self.mesh

    def _join(self, job: Mapping[str, Any], config: TrainConfig) -> bool:
        """Whether the job's process group is another one than the last job's."""
        if job["store"] == self.store:
            return False
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
        self.store = job["store"]
        return True


def run_reference(config: TrainConfig, gradients: Path, say: Say) -> dict[str, Any]:
    """Trains in this process alone and leaves its first gradients in `gradients` (fp32, one after another)."""
    trainer = Trainer(config, Mesh.alone(config.layout(1)))
    return _train(trainer, say, lambda: np.save(gradients, first_gradients(trainer.engine.buffers, trainer.table)))


def run_layout(config: TrainConfig, mesh: Mesh, gradients: Path, say: Say) -> dict[str, Any]:
    """Trains as a rank of `mesh`, and compares.

    Raises:
        TkError: replicas that must be bit-equal are not.
    """
    trainer = Trainer(config, mesh)
    found: dict[str, Any] = {}
    buffers, table = trainer.engine.buffers, trainer.table

    def compare() -> None:
        found.update(compare_gradients(buffers, table, np.load(gradients, mmap_mode="r")))

    curves = _train(trainer, say, compare)
    trainer.checkpointer.replicas.check(config.train.steps)
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
