"""The bytes that offload moves in a step of a rank, over the link to a GPU and from and to files (no torch)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.buckets import Bucket
from ...core.layout import Layout
from .model_states import FROZEN, StatePart


@dataclass(frozen=True, slots=True)
class Moved:
    """The bytes of one part that a rank moves in a step.

    Attributes:
        part: the part of the model states, or "activations".
        down, up: from the device to the host, and back; nothing is moved where a rank trains on a CPU.
        read, written: from and to files.
    """

    part: str
    down: int = 0
    up: int = 0
    read: int = 0
    written: int = 0


def moved_bytes(
    layout: Layout,
    plans: Sequence[Bucket],
    parts: Mapping[str, StatePart],
    num_micro_batches: int,
    gathered_twice: float,
) -> tuple[Moved, ...]:
    """Returns what each part moves; none without offload.

    Args:
        layout: the numbers of ranks, and how they share states.
        plans: the rank's buckets of trained parameters.
        parts: the parts of the rank's model states.
        num_micro_batches: the number of micro-batches of the rank.
        gathered_twice: the share of the parameters that a backward pass gathers again at stage 3.
    """
    if all(part.tier == "none" for part in parts.values()):
        return ()
    own = parts["optimizer"].sizes
    on_disk = parts["optimizer"].nbytes if parts["optimizer"].tier == "disk" else 0
    gathers = num_micro_batches * (1 + gathered_twice)
    frozen = [_frozen(parts[FROZEN], gathers)] if FROZEN in parts and parts[FROZEN].tier != "none" else []
    return (
        _parameters(parts["parameters"], own, gathers),
        *frozen,
        _gradients(layout, plans, parts["gradients"], own, num_micro_batches),
        Moved("optimizer", read=on_disk, written=on_disk),
    )


def _parameters(part: StatePart, own: Sequence[int], gathers: float) -> Moved:
    """An update on the host takes and returns a rank's own parameters; offloaded ones go up for each gather."""
    size = part.bytes_of(own)
    if part.tier == "none":
        return Moved("parameters", down=size, up=size)
    up = round(size * gathers)
    return Moved("parameters", up=up, **(_disk(up + size, size) if part.tier == "disk" else {}))


def _frozen(part: StatePart, gathers: float) -> Moved:
    """Offloaded ones go up for each gather, and nothing changes them."""
    up = round(part.bytes_of(part.sizes) * gathers)
    return Moved(FROZEN, up=up, read=up if part.tier == "disk" else 0)


def _gradients(layout: Layout, plans: Sequence[Bucket], part: StatePart, own: Sequence[int], passes: int) -> Moved:
    """Gradients go down once, or in every pass if their sum is kept there; the norm and the update read the sum."""
    size, whole = part.bytes_of(own), part.bytes_of(part.sizes)
    if part.tier == "none":
        return Moved("gradients", down=size)
    spreads = layout.families
    summed = [1 < spreads[plan.family.name].group_size < spreads[plan.family.name].data for plan in plans]
    again = part.bytes_of([length * each for length, each in zip(own, summed, strict=True)])  # the sum over replicas
    if layout.zero >= 2:
        down, up = passes * size + again, again
        read, written = (passes - 1) * size + 2 * size + again, passes * size + again
    else:  # whole buckets, until the last pass has exchanged them
        down, up = (passes - 1) * whole + size + again, (passes - 1) * whole + again
        written_again = part.bytes_of([length * each for length, each in zip(part.sizes, summed, strict=True)])
        read, written = (passes - 1) * whole + 2 * size + again, passes * whole + written_again
    return Moved("gradients", down=down, up=up, **(_disk(read, written) if part.tier == "disk" else {}))


def _disk(read: int, written: int) -> dict[str, int]:
    return {"read": read, "written": written}


def in_all(moved: tuple[Moved, ...]) -> Moved:
    """Returns the sums over all parts."""
    return Moved("in all", *(sum(getattr(each, name) for each in moved) for name in ("down", "up", "read", "written")))
