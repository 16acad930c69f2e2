"""The result of a load test: percentiles of latencies, throughput, and the part that met the targets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...core.line_chart import Curve, Panel, Points, draw_panels
from .load_test import OK, Observation

PERCENTILES: Final = (50, 90, 99)
_POINTS: Final = 200  # of a curve


@dataclass(frozen=True)
class Targets:
    """The latencies that callers were promised (service level objective); None = any.

    Attributes:
        first_token_seconds: the longest time to the first token.
        token_seconds: the longest mean time per token after it.
    """

    first_token_seconds: float | None = None
    token_seconds: float | None = None

    def are_met(self, seen: Observation) -> bool:
        """Returns whether a request completed within the targets."""
        if seen.status != OK or not seen.messages:
            return False
        first, later = self.first_token_seconds, self.token_seconds
        return (first is None or seen.first_token_seconds <= first) and (later is None or seen.token_seconds <= later)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Returns the smallest value that `percent` of the values do not exceed (nearest rank); None without values."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)  # rounded up
    return sorted(values)[max(0, int(rank) - 1)]


def summary(observations: Sequence[Observation], targets: Targets) -> dict[str, Any]:
    """Returns the result as a JSON document; times are in seconds, rates per second."""
    completed = [seen for seen in observations if seen.status == OK and seen.messages]
    seconds = max((seen.ended for seen in observations), default=0.0)
    met = sum(targets.are_met(seen) for seen in observations)
    return {
        "seconds": seconds,
        "requests": len(observations),
        "statuses": dict(Counter(seen.status for seen in observations)),
        "requests_per_second": _rate(len(completed), seconds),
        "tokens_per_second": _rate(sum(seen.num_tokens for seen in observations), seconds),
        "goodput_per_second": _rate(met, seconds),
        "met_targets": met / len(observations) if observations else 0.0,
        "latest_send_seconds": max((seen.sent - seen.due for seen in observations), default=0.0),
        "latencies": {
            name: {"mean": sum(values) / len(values) if values else None}
            | {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
            for name, values in latencies(completed).items()
        },
    }


def latencies(completed: Sequence[Observation]) -> dict[str, list[float]]:
    """Returns the latencies of completed requests by name, in seconds.

    "first token" and "whole request" count from the time at which a request was due, "between tokens" has every pause
    between two messages, "per token" one mean per request.
    """
    return {
        "first token": [seen.first_token_seconds for seen in completed],
        "between tokens": [gap for seen in completed for gap in seen.gaps],
        "per token": [seen.token_seconds for seen in completed if len(seen.messages) > 1],
        "whole request": [seen.ended - seen.due for seen in completed],
    }


def table(result: dict[str, Any]) -> str:
    """Returns a summary as lines for a terminal."""
    statuses = ", ".join(f"{count} {name}" for name, count in sorted(result["statuses"].items()))
    lines = [
        f"{result['requests']} requests in {result['seconds']:.1f} s: {statuses}",
        f"{result['requests_per_second']:.2f} requests/s completed, {result['tokens_per_second']:.1f} tokens/s, "
        f"{result['goodput_per_second']:.2f} requests/s within the targets ({100 * result['met_targets']:.1f} %)",
        f"{'milliseconds':<16}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTILES))),
    ]
    for name, values in result["latencies"].items():
        cells = ("-" if value is None else f"{1000 * value:.1f}" for value in values.values())
        lines.append(f"{name:<16}" + "".join(f"{cell:>10}" for cell in cells))
    if result["latest_send_seconds"] > 0.05:
        late = 1000 * result["latest_send_seconds"]
        lines.append(f"This machine sent requests up to {late:.0f} ms late, which the latencies include.")
    return "\n".join(lines)


def draw(observations: Sequence[Observation]) -> str:
    """Returns an SVG: for each latency, the part of its values (percent) that do not exceed a time (milliseconds)."""
    completed = [seen for seen in observations if seen.status == OK and seen.messages]
    panels = [
        Panel(f"{name}: % within ms", (Curve(_distribution(values)),)) for name, values in latencies(completed).items()
    ]
    return draw_panels(panels, ())


def _distribution(values: Sequence[float]) -> Points:
    percents = [100 * number / _POINTS for number in range(_POINTS + 1)] if values else []
    return [(1000 * (percentile(values, percent) or 0.0), percent) for percent in percents]


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
