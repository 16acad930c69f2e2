"""What bench_quality.py measures: models with their formats, and how much worse than another one each may be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tk.benchmarks.quality.rewritten import permuted, with_outliers

GIVEN: Final = "given"
OUTLIERS: Final = "outliers"
PERMUTED: Final = "permuted"
COPIES: Final[Mapping[str, Callable[[Path, Path], Path]]] = MappingProxyType(
    {OUTLIERS: with_outliers, PERMUTED: permuted}
)


@dataclass(frozen=True)
class QualityCase:
    """One measurement.

    Attributes:
        name: its name.
        model: GIVEN, or the key of its copy in COPIES.
        options: options of `LLM`; empty where `peer` is set.
        beside: the name of the case that it is compared with; "": the first one, which is compared with none.
        most: the largest ratio of perplexities that is promised; None: nothing is.
        peer: the kind of llama.cpp's quantization; "": tk computes.
    """

    name: str
    model: str = GIVEN
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: str = ""
    most: float | None = None
    peer: str = ""


def _cases() -> tuple[QualityCase, ...]:
    wide, first = {"dtype": "fp32"}, "fp32"
    plain = (("int8", 1.001), ("k8v4", 1.005), ("fp8", 1.02), ("int4", 1.02))
    harder = (("int8", 1.003), ("k8v4", 1.01), ("int4", 1.04))
    return (
        QualityCase(first, options=wide),
        QualityCase("bf16", options={"dtype": "bf16"}, beside=first, most=1.002),
        *(
            QualityCase(f"KV {kind}", options={**wide, "kv_dtype": kind}, beside=first, most=most)
            for kind, most in plain
        ),
        QualityCase("weights int8", options={**wide, "weight_dtype": "int8"}, beside=first, most=1.005),
        QualityCase("weights int4", options={**wide, "weight_dtype": "int4"}, beside=first),
        QualityCase("outliers, fp32", OUTLIERS, wide, first, 1.00001),
        *(
            QualityCase(f"outliers, KV {kind}", OUTLIERS, {**wide, "kv_dtype": kind}, "outliers, fp32", most)
            for kind, most in harder
        ),
        QualityCase("permuted, llama.cpp Q4_1", PERMUTED, beside=first, peer="Q4_1"),
        QualityCase(
            "permuted, weights int4", PERMUTED, {**wide, "weight_dtype": "int4"}, "permuted, llama.cpp Q4_1", 1.05
        ),
    )


CASES: Final = _cases()
