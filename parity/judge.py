"""The verdict on a layout: its largest relative differences from one process, and the bounds on them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from ..train.config.sections import OptimizerSection
from .layout import ParityLayout

# |g - g0| <= 1e-5 |g0| + 1e-7 |G| is |g - g0| / (|g0| + TOTAL_SHARE |G|) <= 1e-5: a relative difference with one bound.
TOTAL_SHARE: Final = 1e-2
# Rounding may send a token with two equally likely experts to either; later steps then differ. It must not happen in
# the first steps.
SAME_ROUTING_STEPS: Final = 10
COMPARED_UPDATES: Final = 10  # the weights are compared after so many steps, in which the routing must be the same
# In its first steps Adam changes a weight by the learning rate however small the gradient is, down to this eps: with a
# smaller one, gradients that consist of rounding would be compared.
LEAST_EPS: Final = 1e-6
# Moments that differ by rounding may become different values of bf16: 6e-6 was measured in a mixture of experts.
BF16_UPDATES: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative differences allowed; None = the report shows the difference without a bound."""

    loss: float
    grad_norm: float | None
    gradients: float | None
    updates: float | None


BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {
        "fp32": Bounds(1e-5, 1e-4, 1e-5, 1e-5),
        "bf16": Bounds(1e-3, None, None, None),
        "fp16": Bounds(1e-3, None, None, None),
    }
)


def bounds_for(precision: str, options: OptimizerSection) -> Bounds:
    """Returns the bounds for parameters of a precision and an optimizer."""
    bounds = BOUNDS[precision]
    if bounds.updates is None or options.eps < LEAST_EPS:
        return replace(bounds, updates=None)
    return replace(bounds, updates=BF16_UPDATES) if options.states == "bf16" else bounds


@dataclass(frozen=True, slots=True)
class Result:
    """The comparison of a layout with one process.

    Attributes:
        loss, grad_norm: the largest relative difference over the steps; None = not measured, or not finite.
        gradients: the largest |g - g0| / (|g0| + 0.01 |G|) over the first step's parameters; G: all gradients together.
        parameter: the name of the parameter with the largest difference.
        updates: |w - w1| / |w1| after COMPARED_UPDATES steps or the last one, w1 being all trained tensors together of
            one process.
        error: the reason for missing numbers; "" if the layout ran.
        seconds: the time of the layout's run.
        routing_changed: the first step (from 1) that sent a token to another expert than on one process, after which
            steps are not compared; 0 = none.
    """

    layout: ParityLayout
    loss: float | None = None
    grad_norm: float | None = None
    gradients: float | None = None
    parameter: str = ""
    updates: float | None = None
    error: str = ""
    seconds: float = 0.0
    routing_changed: int = 0

    def badness(self, bounds: Bounds) -> float:
        """Returns the largest ratio of a difference to its bound; infinity if a difference is missing."""
        pairs = ((getattr(self, name), bound) for name, bound in asdict(bounds).items() if bound is not None)
        return max(math.inf if value is None else value / bound for value, bound in pairs)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for a results file and `tk parity --json`."""
        data: dict[str, Any] = {"layout": self.layout.to_json(), "loss": self.loss, "grad_norm": self.grad_norm}
        data |= {"gradients": self.gradients, "parameter": self.parameter, "updates": self.updates}
        data |= {"seconds": round(self.seconds, 3)}
        data |= {"routing_changed": self.routing_changed} if self.routing_changed else {}
        return data | ({"error": self.error} if self.error else {})

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Result":
        """Rebuilds the result that `to_json` described."""
        return Result(**{**data, "layout": ParityLayout.model_validate(data["layout"])})


def compare_curves(mine: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest |a - e| / |e| over the steps, at least one; infinity if one of them is not finite."""
    return max(relative(abs(a - e), abs(e)) for a, e in zip(mine, expected, strict=True))


def relative(difference: float, size: float) -> float:
    """Returns difference / size, both at least 0: 0 without a difference, infinity in place of NaN and of n / 0.

    A NaN would be lost: `max` keeps the value before it.
    """
    ratio = difference / size if size else math.inf if difference else 0.0
    return ratio if math.isfinite(ratio) else math.inf


def common_start(mine: Sequence[float], expected: Sequence[float]) -> int:
    """Returns the number of equal values before the first difference."""
    return next((i for i, (a, e) in enumerate(zip(mine, expected, strict=True)) if a != e), len(expected))


def finite(value: float) -> float | None:
    """Returns the value, or None in place of an infinity or NaN, which JSON lacks."""
    return value if math.isfinite(value) else None


def worst_first(results: Sequence[Result], bounds: Bounds) -> list[Result]:
    """Sorts results: errors first, then by the largest ratio of a difference to its bound."""
    return sorted(results, key=lambda result: -result.badness(bounds))
