"""How long pipeline ranks wait and how much they keep, where forward, backward of inputs and of weights take one unit.

Letters: p ranks, v virtual stages, m micro-batches.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """A schedule's cost.

    Attributes:
        bubble: share of all ranks' time that is spent waiting.
        peak_in_flight: per rank, the most micro-batches times stages whose activations it keeps.
    """

    bubble: float
    peak_in_flight: tuple[int, ...]


def play(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> ScheduleFacts:
    """The cost of a schedule of [parallel]: GPipe (arXiv 1811.06965), 1F1B and interleaved 1F1B (arXiv 2104.04473,
    section 2.2), ZB-H1 (arXiv 2401.10241, section 3)."""
    p, v, m = pp, virtual_stages, num_micro_batches
    idle = (p - 1) * (1 if schedule == "zb-h1" else 3)
    bubble = idle / (3 * v * m + idle)
    if schedule == "gpipe":
        peaks = [m * v] * p
    elif schedule == "interleaved":
        peaks = [min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)]
    elif schedule == "zb-h1":  # weights' gradients come late
        peaks = [min(m, p)] * p
    else:
        peaks = [min(m, p - rank) for rank in range(p)]
    return ScheduleFacts(bubble, tuple(peaks))
