"""Another step of a served model, to be loaded beside the running one."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ....core.errors import ConfigError
from ....core.machine_memory import free_memory
from ....core.progress import format_bytes
from .memory_plan import MemoryPlan, on_gpus
from .model_source import ModelSource


def open_beside(running: ModelSource, checkpoint: Path, process_ids: Iterable[int]) -> ModelSource:
    """Opens another checkpoint of the running model, with a cache of the same size.

    Args:
        running: the source of the running model.
        checkpoint: a step folder, a run folder (its newest committed step) or a Hugging Face folder.
        process_ids: the running model's workers.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        ConfigError: it is another model, or the memory is too small for both.
    """
    memory = running.memory
    options = replace(
        running.options,
        checkpoint=checkpoint,
        dtype=memory.dtype,
        kv_dtype=memory.kv_dtype,
        kv_blocks=memory.num_blocks,
        kv_memory=None,
        max_model_len=memory.max_model_len,
    )
    source = ModelSource.open(options, running)
    check_same_model(running, source)
    if not on_gpus(options):  # there a cache is committed as a whole, so the plan has counted it
        check_room(running.memory, source.memory, resident_bytes(process_ids), free_memory())
    return source


def check_same_model(running: ModelSource, other: ModelSource) -> None:
    """Raises ConfigError unless two checkpoints differ in weights alone."""
    mine, theirs = running.config.model_dump(), other.config.model_dump()
    differing = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if differing:
        raise ConfigError(
            f"The model of {other.checkpoint.path} differs from the served one in {', '.join(differing)}. Start "
            "another server for it."
        )
    here, there = running.text_digests, other.text_digests
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if running.info.eos_token_ids != other.info.eos_token_ids:
        differing.append("eos_token_id of config.json")
    if differing:
        raise ConfigError(
            f"{', '.join(differing)} of {other.checkpoint.path} differ from the served ones, so texts would become "
            "other tokens or end elsewhere. Start another server for it."
        )


def check_room(running: MemoryPlan, loading: MemoryPlan, resident: int, free: int) -> None:
    """Checks that two sets of weights and caches fit, also when the running one uses all that its plan allows.

    Args:
        running, loading: the two plans.
        resident: the bytes that the running one's workers occupy: pages of a cache are committed as they are used.
        free: the free bytes of this machine.

    Raises:
        ConfigError: they do not fit.
    """
    uncommitted = max(0, running.tp * running.total_bytes - resident)
    needed = loading.tp * loading.total_bytes
    if needed + uncommitted > free:
        raise ConfigError(
            f"A second set of weights and its cache take {format_bytes(needed)}, the running one can grow by "
            f"{format_bytes(uncommitted)}, and this machine has {format_bytes(free)} free. Serve with a smaller "
            "--kv-memory, or start a new server."
        )


def resident_bytes(process_ids: Iterable[int]) -> int:
    """Returns the bytes of memory that processes occupy; one that has ended occupies none."""
    total = 0
    for process in process_ids:
        with suppress(OSError):
            lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return total
