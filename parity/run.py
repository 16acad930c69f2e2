"""A whole comparison: first the reference runs on one process, then the layouts, ordered by size and groups."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..train.config.train_config import TrainConfig
from .judge import SAME_ROUTING_STEPS, Result, common_start, compare_curves, finite
from .layout import ParityLayout
from .pool import Outcome, Pool, PoolJob, first_answer
from .subject import Subject

MODULE: Final = "tk.parity.rank"
PATIENCE_SECONDS: Final = 60.0  # in addition to the ranks' timeout, so that hanging ranks report it themselves
SEEDS: Final = 10  # tried until no choice of an expert is close in the steps in which layouts must make the same ones


@dataclass(frozen=True)
class Reference:
    """The results of a run on one process.

    Attributes:
        values: the folder of its files of values.
        loss, grad_norm: the loss and the gradient norm of each step.
        routing: the routing checksum of each step.
        seed: the seed of the run, which is also that of its layouts.
    """

    values: Path
    loss: list[float]
    grad_norm: list[float]
    routing: list[float]
    seed: int


class ParityRun:
    """The comparison of one subject's layouts with one process.

    Args:
        subject: the model, data and optimizer.
        folder: the folder for references and for the output of ranks; the caller removes it.
        num_ranks: the largest number of processes at a time.
        module: the dotted name of the module that the processes run.
    """

    def __init__(self, subject: Subject, folder: Path, num_ranks: int, module: str = MODULE) -> None:
        self.subject = subject
        self.folder = folder
        self.num_ranks = num_ranks
        self.module = module
        self.references: dict[str, Reference] = {}

    def run(self, layouts: Sequence[ParityLayout]) -> Iterator[Result]:
        """Yields the layouts' results: layouts with few ranks first, layouts with the same groups together.

        Raises:
            TkError: a reference run on one process failed.
        """
        timeout = self.subject.base.parallel.timeout_seconds + PATIENCE_SECONDS
        with Pool(self.num_ranks, self.module, self.folder, timeout) as pool:
            self._make_references(pool, layouts)
            jobs = {self._job(layout): layout for layout in layouts}
            for outcome in pool.run(sorted(jobs, key=lambda job: job.groups)):
                yield self._result(jobs[outcome.job], outcome)

    def _make_references(self, pool: Pool, layouts: Sequence[ParityLayout]) -> None:
        """Makes the references of layouts; those of the built-in subject get seeds with which no choice is close."""
        first, seed = {self._key(layout): layout for layout in layouts}, self.subject.base.train.seed
        last = seed + SEEDS - 1 if self.subject.varies_model else seed
        while first:
            jobs = [self._reference_job(key, layout, seed) for key, layout in first.items()]
            for outcome in pool.run(jobs):
                answer, key = first_answer(outcome), outcome.job.groups
                if seed == last or not any(answer.get("close", ())[:SAME_ROUTING_STEPS]):
                    curves = {name: answer[name] for name in ("loss", "grad_norm", "routing")}
                    self.references[key] = Reference(Path(outcome.job.payload["values"]), **curves, seed=seed)
                    del first[key]
            seed += 1

    def _reference_job(self, key: str, layout: ParityLayout, seed: int) -> PoolJob:
        config = _with_seed(self.subject.reference(layout), seed)
        return PoolJob("one process", self._payload(layout, config, self._values_folder(key), reference=True), 1, key)

    def _payload(
        self, layout: ParityLayout, config: TrainConfig, values: Path, *, reference: bool = False
    ) -> dict[str, Any]:
        offload = config.offload.model_copy(update={"folder": config.offload.folder or str(self.folder)})
        return {
            "config": config.model_copy(update={"offload": offload}).model_dump(mode="json"),
            "values": str(values),
            "reference": reference,
            "foreign": layout.foreign,
            "skipped_step": self.subject.skipped_step,
        }

    def _values_folder(self, key: str) -> Path:
        folder = self.folder / f"values-{key}"
        folder.mkdir(exist_ok=True)
        return folder

    def _key(self, layout: ParityLayout) -> str:
        """Returns the key of a layout's reference: layouts with the same reference have the same key."""
        text = f"{layout.foreign} {self.subject.reference(layout).model_dump_json()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _job(self, layout: ParityLayout) -> PoolJob:
        reference = self.references[self._key(layout)]
        config = _with_seed(self.subject.config(layout), reference.seed)
        model, spread = config.model, config.layout(None)
        # All places of ranks, without the keys that make no groups.
        places = replace(
            spread, zero=min(spread.zero, 1), shard_size=spread.group_size, virtual_stages=1, bucket_size=1
        )
        groups = (places, model.num_key_value_heads, layout.tied, layout.foreign)
        return PoolJob(str(layout), self._payload(layout, config, reference.values), layout.num_ranks, repr(groups))

    def _result(self, layout: ParityLayout, outcome: Outcome) -> Result:
        if outcome.error:
            return Result(layout, error=outcome.error, seconds=outcome.seconds)
        reference = self.references[self._key(layout)]
        answer = outcome.answers[0]
        same = common_start(answer["routing"], reference.routing)
        changed = same + 1 if same < len(reference.routing) else 0
        if 0 < changed <= SAME_ROUTING_STEPS:
            error = (
                f"a token was sent to another expert in step {changed}; the first {SAME_ROUTING_STEPS} steps must have "
                "the routing of one process"
            )
            return Result(layout, error=error, seconds=outcome.seconds, routing_changed=changed)
        return Result(
            layout,
            loss=finite(compare_curves(answer["loss"][:same], reference.loss[:same])),
            grad_norm=finite(compare_curves(answer["grad_norm"][:same], reference.grad_norm[:same])),
            gradients=finite(answer["gradients"]),
            parameter=answer["parameter"],
            updates=finite(answer["updates"]),
            seconds=outcome.seconds,
            routing_changed=changed,
        )


def _with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})
