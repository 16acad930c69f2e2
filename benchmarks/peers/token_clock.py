"""The workload of bench_serving.py, and the speeds of a run from the times of its tokens. It needs no package."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Speeds = dict[str, float]  # tokens per second over all sequences: "prefill", and "decode" if more than a token is new


class NotTogether(Exception):
    """The first sequence of a run ended before, or soon after, the last one began."""


@dataclass(frozen=True)
class SpeedWorkload:
    """A batch of random prompts, each of which is continued by as many tokens.

    Attributes:
        batch: the number of sequences.
        prompt_tokens: the tokens of each prompt.
        new_tokens: the new tokens of each sequence.
        windows: the parts of equal length into which decoding is cut; its speed is the median of theirs.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    windows: int = 1


def speeds(workload: SpeedWorkload, start: float, arrivals: Sequence[Sequence[float]]) -> Speeds:
    """Returns the speeds of a run.

    Prefill lasts until every sequence has its first token. Decoding counts only while all sequences run: from there
    until the first of them ends.

    Args:
        workload: the workload.
        start: the time of the start, in seconds.
        arrivals: the times of each sequence's new tokens, in order.

    Raises:
        NotTogether: the sequences ran together for less than a step per window.
    """
    begun = max(times[0] for times in arrivals)
    found = {"prefill": workload.batch * workload.prompt_tokens / (begun - start)}
    if workload.new_tokens == 1:
        return found
    ended = min(times[-1] for times in arrivals)
    steady = sorted(time for times in arrivals for time in times if begun <= time <= ended)
    steps = max(0, len(steady) - 1) // workload.batch
    if steps < workload.windows:
        raise NotTogether(f"{workload.batch} sequences ran together for {steps} steps; more new tokens are needed.")
    borders = [steady[workload.batch * (steps * i // workload.windows)] for i in range(workload.windows + 1)]
    counts = [steps * (i + 1) // workload.windows - steps * i // workload.windows for i in range(workload.windows)]
    found["decode"] = median(
        workload.batch * count / (after - before)
        for count, before, after in zip(counts, borders, borders[1:], strict=False)
    )
    return found
