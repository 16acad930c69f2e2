"""The least offload with which a run fits into the memory of its ranks (no torch)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, get_args

from ...core.progress import format_bytes
from ..config.sections import OffloadSection, Tier
from .machines import Machines, per_host
from .placed_bytes import PlacedBytes
from .planned_run import PlannedRun

_PARTS: Final = ("optimizer", "gradients", "parameters", "activations")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory of the machines.

    Attributes:
        rank: the bytes of the device of a rank, or of a rank on a CPU.
        host: the bytes that all ranks of a host may use in its memory beside GPUs.
        on_gpu: whether ranks compute on GPUs.
    """

    rank: int
    host: int
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer to what fits.

    Attributes:
        run: the run with the least offload that fits; if none does, with the one that needs the least memory.
        fits: whether it fits.
        text: the answer in words.
    """

    run: PlannedRun
    fits: bool
    text: str


def least_offload(run: PlannedRun, limit: MemoryLimit, machines: Machines) -> Fit:
    """Tries the places of model states and activations, those that take the least time per step first."""
    offers = sorted(_offers(run, limit.on_gpu), key=lambda each: _cost(each, limit, machines))
    for each in offers:
        if not any(excess(each, limit, machines)):
            return Fit(each, True, f"{_words(each.config.offload)} is the least that fits into {_limit(limit)}.")
    smallest = min(offers, key=lambda each: excess(each, limit, machines))
    return Fit(smallest, False, _refusal(smallest, limit, machines))


def _offers(run: PlannedRun, on_gpu: bool) -> Iterator[PlannedRun]:
    """Yields the run with each choice of places that a configuration may have. On a CPU "cpu" makes no room."""
    tiers: list[Tier] = [tier for tier in get_args(Tier) if on_gpu or tier != "cpu"]
    kept = run.config.offload.model_dump(include={"folder", "buffers"})
    of_activations: list[Tier] = ["none", "cpu"] if on_gpu else ["none"]
    for optimizer, gradients, parameters, activations in product(tiers, tiers, tiers, of_activations):
        if optimizer == "none" and (gradients, parameters) != ("none", "none"):
            continue  # the optimizer's states leave first
        places = dict(zip(_PARTS, (optimizer, gradients, parameters, activations), strict=True))
        offload = OffloadSection.model_validate(kept | places)
        if not offload.problem_at(run.layout.zero):
            yield run.with_offload(offload)


def _cost(run: PlannedRun, limit: MemoryLimit, machines: Machines) -> float:
    """Returns the seconds of what offload moves in a step.

    What passes move counts twice: they wait for it, while an update goes on beside the next step.
    """
    neighbours, offload = machines.ranks_of_a_host(run.layout.world_size), run.config.offload
    in_passes = {name for name in _PARTS if name != "optimizer" and getattr(offload, name) != "none"}
    return sum(
        machines.cost(each, neighbours, limit.on_gpu) * (2 if each.part in in_passes else 1) for each in run.moved()
    )


def excess(run: PlannedRun, limit: MemoryLimit, machines: Machines) -> tuple[int, int]:
    """Returns the bytes by which a run exceeds the memory of a rank, and that of a host beside GPUs; 0 if it fits."""
    memory = run.memory()
    if not limit.on_gpu:
        return max(0, max(run.cpu_memory(memory)) - limit.rank), 0
    on_host = _on_host(run, memory, machines.ranks_of_a_host(run.layout.world_size))
    return max(0, max(placed.on_device for placed in memory) - limit.rank), max(0, on_host - limit.host)


def _on_host(run: PlannedRun, memory: Sequence[PlacedBytes], neighbours: int) -> int:
    """Returns the bytes of the fullest host, beside GPUs."""
    return per_host([placed.on_host for placed in memory], run.layout.stage_size, neighbours)


def _refusal(run: PlannedRun, limit: MemoryLimit, machines: Machines) -> str:
    """Returns why nothing fits, with the largest part that is left."""
    memory = run.memory()
    fullest = max(memory, key=lambda placed: placed.on_device if limit.on_gpu else placed.on_cpu)
    parts = fullest.device if limit.on_gpu else {**fullest.host, **fullest.device}
    if limit.on_gpu and fullest.on_device <= limit.rank:
        parts = max(memory, key=lambda placed: placed.on_host).host
    largest = max(parts, key=lambda name: parts[name])
    needed = fullest.on_device if limit.on_gpu else max(run.cpu_memory(memory))
    text = f"Nothing fits into {_limit(limit)}. With {_words(run.config.offload)} a rank needs {format_bytes(needed)}"
    if limit.on_gpu:
        neighbours = machines.ranks_of_a_host(run.layout.world_size)
        text += f", and a host {format_bytes(_on_host(run, memory, neighbours))}"
    return (
        f"{text}; the largest part left is {largest}, {format_bytes(parts[largest])}. Allow more, or make the "
        "model, [train] micro_batch_size or seq_len smaller."
    )


def _words(offload: OffloadSection) -> str:
    places = {name: getattr(offload, name) for name in _PARTS}
    moved = [f'{name} = "{tier}"' for name, tier in places.items() if tier != "none"]
    return f"[offload] {', '.join(moved)}" if moved else "no offload"


def _limit(limit: MemoryLimit) -> str:
    if limit.on_gpu:
        return f"{format_bytes(limit.rank)} of a GPU and {format_bytes(limit.host)} of a host"
    return f"{format_bytes(limit.rank)} per rank on CPUs"
