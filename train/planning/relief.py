"""The keys of a configuration with which a run that is too large for this machine takes least memory (no torch)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from ...core.integers import ceil_div
from ...core.progress import format_bytes
from ..pipeline.schedules import make_schedule
from ..pipeline.simulator import simulate
from .placed_bytes import PlacedBytes
from .planned_run import PlannedRun
from .problems import MOST_PASSES

Key = tuple[str, str, Any]  # section, key and value
_WORTHWHILE: Final = 0.98  # of the memory before
_ROWS: Final = "a smaller [train] micro_batch_size or seq_len makes it smaller."
_SMALLER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "activations": '[recompute] mode = "full", or a smaller [train] micro_batch_size, makes it smaller.',
        "optimizer": "[zero] stage = 1 divides it among ranks, and [offload] optimizer moves it out.",
        "gradients": "[zero] stage = 2 divides it among ranks, and [offload] gradients moves it out.",
        "parameters": "[zero] stage = 3 or [parallel] tp divides it among ranks.",
    }
)
_MOST_ON_DISK: Final = 16  # times this machine's memory; the plan of files of more would take minutes


def relief(run: PlannedRun, available: int) -> str:
    """Returns what to do about a run on CPUs that needs more memory than there is: the keys that help, from its plan.

    Args:
        run: one that is too large.
        available: the bytes of this machine's memory.
    """
    parts = [(size, name) for placed in run.memory() for name, size in {**placed.host, **placed.device}.items()]
    size, name = max(parts)
    largest = f"The largest part is {name}, {format_bytes(size)} of a rank; `tk plan` shows all of them."
    keys: list[Key] = []
    needed = needed_here(run)
    while needed > available:
        changes = _changes(run, disk=needed <= _MOST_ON_DISK * available)
        least, key, best = min(
            ((needed_here(changed), key, changed) for key, changed in changes),
            key=lambda change: change[0],
            default=(needed, ("", "", None), run),
        )
        if least > _WORTHWHILE * needed:
            break
        keys, run, needed = [*keys, key], best, least
    words = " and ".join(f"[{section}] {key} = {json.dumps(value)}" for section, key, value in keys)
    if needed <= available:
        return f"Use {words}: that needs {format_bytes(needed)}. {largest}"
    even = f", since {format_bytes(needed)} are needed even with {words}" if keys else ""
    return f"Use a smaller model or more machines{even}. {largest}"


def largest_part(memory: Sequence[PlacedBytes]) -> str:
    """Returns which part of a rank's memory is the largest, of all pipeline ranks, and what makes it smaller."""
    size, name = max((size, name) for placed in memory for name, size in {**placed.host, **placed.device}.items())
    return (
        f"By its plan the largest part of a rank is {name}, {format_bytes(size)}; {_SMALLER.get(name, _ROWS)} "
        "`tk plan` shows all parts, and `tk plan --fit SIZE` the least offload that fits."
    )


def needed_here(run: PlannedRun) -> int:
    """Returns the bytes of all ranks of a run on the CPUs of one machine."""
    return sum(run.cpu_memory(run.memory())) * run.layout.stage_size


def _changes(run: PlannedRun, *, disk: bool) -> Iterator[tuple[Key, PlannedRun]]:
    """Yields each key that may help, and the run with it; those of states on disk only if `disk`."""
    config = run.config
    keys: list[Key] = []
    if config.recompute.mode != "full":
        keys.append(("recompute", "mode", "full"))
    if config.train.micro_batch_size > 1:
        keys.append(("train", "micro_batch_size", 1))
    if config.zero.stage < 3:
        keys.append(("zero", "stage", 3))
    keys += [
        ("offload", name, "disk")
        for name in ("optimizer", "gradients", "parameters")
        if disk and getattr(config.offload, name) == "none"
    ]
    for key in keys:
        changed = _with(run, key)
        if changed and not changed.config.offload.problem_at(changed.layout.zero):
            yield key, changed


def _with(run: PlannedRun, changed: Key) -> PlannedRun | None:
    """Returns the run with a key; None if its ranks would have too many passes."""
    section, key, value = changed
    part = getattr(run.config, section).model_copy(update={key: value})
    config = run.config.model_copy(update={section: part})
    layout = config.layout(run.layout.world_size, run.on_gpu)
    passes = ceil_div(config.train.global_batch_size, layout.dp * config.train.micro_batch_size)
    if passes * layout.virtual_stages > MOST_PASSES:
        return None
    schedule = make_schedule(config.parallel.schedule, layout.pp, layout.virtual_stages, passes)
    return replace(run, config=config, layout=layout, num_micro_batches=passes, simulation=simulate(schedule))
