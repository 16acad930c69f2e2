"""What counts as the same model: the largest relative differences to one process, and the bounds that they keep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

from .layout import ParityLayout

# |g - g0| <= 1e-5 |g0| + 1e-7 |G| is |g - g0| / (|g0| + TOTAL_SHARE |G|) <= 1e-5: a relative difference with one bound.
TOTAL_SHARE: Final = 1e-2
# A token between two experts goes to either, as rounding falls, and then everything differs; not within so many steps.
SAME_ROUTING_STEPS: Final = 10


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest relative differences; None = shown and not judged."""

    loss: float
    grad_norm: float | None
    gradients: float | None


BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {"fp32": Bounds(1e-5, 1e-4, 1e-5), "bf16": Bounds(1e-3, None, None), "fp16": Bounds(1e-3, None, None)}
)


@dataclass(frozen=True, slots=True)
class Result:
    """How a layout compares with one process.

    Attributes:
        loss, grad_norm: largest relative difference over the steps; None = there is none, or not as a number.
        gradients: largest over the parameters of the first step, |g - g0| / (|g0| + 0.01 |G|); G: all of them together.
        parameter: whose gradient differs most.
        error: why there are no numbers.
        seconds: that it took.
        routing_changed: the first step (1-based) in which a token was sent to another expert than in one process, which
            ends the steps that are compared; 0 = none.
    """

    layout: ParityLayout
    loss: float | None = None
    grad_norm: float | None = None
    gradients: float | None = None
    parameter: str = ""
    error: str = ""
    seconds: float = 0.0
    routing_changed: int = 0

    def badness(self, bounds: Bounds) -> float:
        """The largest difference in units of its bound; infinite where there is none."""
        pairs = ((getattr(self, name), bound) for name, bound in asdict(bounds).items() if bound is not None)
        return max(math.inf if value is None else value / bound for value, bound in pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = {"layout": self.layout.to_json(), "loss": self.loss, "grad_norm": self.grad_norm}
        data |= {"gradients": self.gradients, "parameter": self.parameter, "seconds": round(self.seconds, 3)}
        data |= {"routing_changed": self.routing_changed} if self.routing_changed else {}
        return data | ({"error": self.error} if self.error else {})

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Result":
        """The inverse of `to_json`."""
        return Result(**{**data, "layout": ParityLayout.model_validate(data["layout"])})


def compare_curves(mine: Sequence[float], expected: Sequence[float]) -> float:
    """The largest |a - e| / |e| over steps; 0 / 0 is 0."""
    return max(abs(a - e) / abs(e) if a != e else 0.0 for a, e in zip(mine, expected, strict=True))


def common_start(mine: Sequence[float], expected: Sequence[float]) -> int:
    """How many values are equal before the first that is not."""
    return next((i for i, (a, e) in enumerate(zip(mine, expected, strict=True)) if a != e), len(expected))


def finite(value: float) -> float | None:
    """The value, or None for infinities and what is no number, which JSON lacks."""
    return value if math.isfinite(value) else None


def worst_first(results: Sequence[Result], bounds: Bounds) -> list[Result]:
    """Errors first, then by the largest difference in units of its bound."""
    return sorted(results, key=lambda result: -result.badness(bounds))
