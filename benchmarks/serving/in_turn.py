"""Contestants that run one workload in turn, the medians of their speeds, and the promises about these."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Protocol

from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.benchmarks.serving.peer_process import PeerFailed

Show = Callable[[str], object]


class Contestant(Protocol):
    """Something whose speed is measured."""

    @property
    def name(self) -> str:
        """Its name in what is printed."""

    def run(self, workload: SpeedWorkload) -> Speeds:
        """Runs a workload and returns its speeds."""


@dataclass(frozen=True)
class Promise:
    """A bound that a figure must keep.

    Attributes:
        text: the promise in words.
        found: the figure.
        bound: the bound.
        most: whether the bound is the largest good figure, and not the smallest.
    """

    text: str
    found: float
    bound: float
    most: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the figure keeps the bound."""
        return self.found <= self.bound if self.most else self.found >= self.bound

    def line(self) -> str:
        """Formats the promise and how it was kept."""
        word = "at most" if self.most else "at least"
        how = "kept" if self.is_kept else f"MISSED by {abs(self.found / self.bound - 1):.0%}"
        return f"{self.text}: {self.found:.2f}, promised {word} {self.bound:g}: {how}"


def medians_in_turn(
    contestants: Sequence[Contestant], workload: SpeedWorkload, runs: int, show: Show = print
) -> dict[str, Speeds]:
    """Runs a workload several times, all contestants in each round, and returns the median speeds by name.

    Each round begins with another one, so that no contestant keeps a good or a bad place. A peer that fails is left
    out, and shown.
    """
    found: dict[str, list[Speeds]] = {one.name: [] for one in contestants}
    for number in range(runs):
        first = number % len(contestants)
        for one in (*contestants[first:], *contestants[:first]):
            if one.name not in found:
                continue
            try:
                found[one.name].append(one.run(workload))
            except PeerFailed as error:
                del found[one.name]
                show(str(error))
    return {name: {kind: median(run[kind] for run in speeds) for kind in speeds[0]} for name, speeds in found.items()}


def ratios(
    contestants: Sequence[Contestant],
    workloads: Iterable[SpeedWorkload],
    kinds: Iterable[str],
    bound: float,
    runs: int,
    show: Show,
    where: str = "",
) -> list[Promise]:
    """Runs workloads, and promises that each contestant has a part of the last one's speed.

    Args:
        contestants: those that are compared, and the one that they are compared with.
        kinds: the kinds of speed: "prefill", "decode".
        bound: the part.
        runs: the runs of each.
        show: prints a line.
        where: ends the texts of the promises.
    """
    promises = []
    *own, other = (one.name for one in contestants)
    for workload in workloads:
        speeds = medians_in_turn(contestants, workload, runs, show)
        for kind, name in product(kinds, own):
            pair = {each: speeds[each] for each in (name, other)}
            show(f"batch {workload.batch:>3} {kind:<8} {compared(pair, kind)}")
            text = f"{kind} at batch {workload.batch} with {name} beside {other}{where}"
            promises.append(Promise(text, pair[name][kind] / pair[other][kind], bound))
    return promises


def compared(speeds: Mapping[str, Speeds], kind: str) -> str:
    """Formats the speeds of one kind: those of the first contestant, and of each other one with the ratio to it."""
    (name, own), *others = ((name, each[kind]) for name, each in speeds.items())
    return f"{name} {own:.0f} tokens/s" + "".join(f"   {other} {it:.0f} (x {own / it:.2f})" for other, it in others)


def best_of(speeds: Mapping[str, Speeds], kind: str, names: Iterable[str]) -> float | None:
    """Returns the best speed of a kind among contestants; None if none of them ran."""
    return max((speeds[name][kind] for name in names if name in speeds), default=None)
