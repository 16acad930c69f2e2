"""The work of one rank: it trains a few steps at a layout and compares gradients and weights with the reference's."""

import gc
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..core.config import parse
from ..core.errors import TkError
from ..core.local_params import LocalParam
from ..core.process import keep_freed_memory
from ..model.lora.table import is_factor
from ..parallel.collectives import all_reduce
from ..parallel.mesh import Mesh
from ..train.config.train_config import TrainConfig
from ..train.run.trainer import Trainer
from ..train.state.progress import StepResult
from ..train.zero.states.pinned_copies import PinnedCopies
from . import foreign
from .close_choices import CloseChoices
from .gradients import first_gradients
from .rank_loop import Send
from .reference_values import ReferenceValues
from .updates import updated_weights


class Measurer:
    """Carries out the pool's jobs in one process; it keeps process groups between jobs with the same store."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self.store = ""
        self.mesh = Mesh.alone()

    def __call__(self, job: Mapping[str, Any], send: Send) -> dict[str, Any]:
        """Carries out one job.

        Returns:
            Loss, gradient norm and routing checksum of each step; for a layout also the largest difference of a first
            gradient, its parameter, and the difference of the updated weights.
        """
        payload = job["payload"]
        config = parse(payload["config"], TrainConfig, "a layout's configuration")
        values, skipped_step = ReferenceValues(Path(payload["values"]), config.train.steps), payload["skipped_step"]
        if payload["reference"]:
            if payload["foreign"]:
                return foreign.run_reference(config, values, send)
            return run_reference(config, values, send, skipped_step)
        if payload["foreign"]:
            self._join(job, config)
            return foreign.run_layout(config, values, send)
        mesh = replace(self._mesh(job, config), layout=config.layout(job["num_ranks"]))
        return run_layout(config, mesh, values, send, skipped_step)

    def _mesh(self, job: Mapping[str, Any], config: TrainConfig) -> Mesh:
        if self._join(job, config):
            model, seconds = config.model, config.parallel.timeout_seconds
            layout = config.layout(job["num_ranks"])
            self.mesh = Mesh.build(
                layout, model.num_key_value_heads, model.tie_word_embeddings, timeout_seconds=seconds
            )
        return self.mesh

    def _join(self, job: Mapping[str, Any], config: TrainConfig) -> bool:
        """Joins the job's process group; returns False if it is the last job's, which is then kept."""
        if job["store"] == self.store:
            return False
        if dist.is_initialized():
            self.mesh = Mesh.alone()
            dist.destroy_process_group()
            gc.collect()  # a cycle of references could keep the old group, and its polling threads, alive
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job['store']}",
            rank=job["rank"],
            world_size=job["num_ranks"],
            timeout=timedelta(seconds=config.parallel.timeout_seconds),
        )
        self.store = job["store"]
        return True


class ParityTrainer(Trainer):
    """A trainer whose adapters begin random: if B were zeros, so would be the first gradients of A."""

    def fill(self, copies: PinnedCopies, local: LocalParam, parameter: torch.Tensor) -> None:
        """Writes a parameter's initial values; those of both factors of an adapter are random."""
        pieces = local.pieces
        if is_factor(pieces[0].tensor):
            pieces = tuple(replace(piece, tensor=replace(piece.tensor, init="uniform")) for piece in pieces)
        super().fill(copies, replace(local, pieces=pieces), parameter)


def run_reference(config: TrainConfig, values: ReferenceValues, send: Send, skipped_step: int = 0) -> dict[str, Any]:
    """Trains in this process alone and writes its values to the files of `values`.

    Args:
        skipped_step: the step, counted from 1, in which gradients are made infinite; 0 = none.

    Returns:
        The curves of a layout, and "close": for each step the tokens that rounding could send to another expert.
    """
    trainer = ParityTrainer(config, Mesh.alone(config.layout(1)))
    engine, table = trainer.engine, trainer.spec.table
    choices, close = CloseChoices(trainer.stages), list[float]()

    def write(step: int) -> None:
        close.append(choices.take())
        if step == 1:
            np.save(values.gradients, first_gradients(engine.buffers, table))
        if step == values.num_updates:
            np.save(values.weights, updated_weights(engine.optimizer, table))

    return _train(trainer, send, skipped_step, write) | {"close": close}


def run_layout(
    config: TrainConfig, mesh: Mesh, values: ReferenceValues, send: Send, skipped_step: int = 0
) -> dict[str, Any]:
    """Trains as a rank of `mesh`, and compares its values with the files of `values`.

    Args:
        skipped_step: the step, counted from 1, in which gradients are made infinite; 0 = none.

    Raises:
        TkError: replicas that must be bit-equal differ.
    """
    trainer = ParityTrainer(config, mesh)
    found: dict[str, Any] = {}
    with closing(trainer.engine.optimizer):
        curves = _train(trainer, send, skipped_step, lambda step: found.update(values.compare(step, trainer.engine)))
        trainer.checkpointer.replicas.check(config.train.steps)
    return curves | found


def _train(
    trainer: Trainer, send: Send, skipped_step: int, after_step: Callable[[int], None]
) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": [], "routing": []}
    for stage in trainer.pipeline.stages:
        stage.record_routing = True
    for step in range(1, trainer.config.train.steps + 1):
        result = trainer.step() if step != skipped_step else _step_with_infinite_gradients(trainer)
        curves["loss"].append(result.loss)
        curves["grad_norm"].append(result.grad_norm)
        curves["routing"].append(_routing(trainer))
        after_step(step)
        send({"step": step})
    return curves


def _step_with_infinite_gradients(trainer: Trainer) -> StepResult:
    """Makes a step that updates nothing; loss and gradient norm, which are not numbers, become 0.

    Raises:
        TkError: the step updated something.
    """
    scale = trainer.engine.loss_scale
    before, scale.value = scale.value, math.inf
    result = trainer.step()
    scale.value = before
    if result.updated:
        raise TkError(f"Step {trainer.state.step} has infinite gradients, and updated parameters.")
    return replace(result, loss=0.0, grad_norm=0.0)


def _routing(trainer: Trainer) -> float:
    """Returns the checksum of the experts of all tokens in all layers; 0 for a model without experts."""
    value = torch.zeros((), dtype=torch.float64, device=trainer.device)
    if trainer.mesh.tp.rank == 0:
        value += trainer.pipeline.routing()
    return float(all_reduce(value, trainer.mesh.world))
