"""The options of a low-rank adapter, by the meaning and defaults of PEFT's `LoraConfig` where the two have one name."""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from ...core.config import Section

ALL_LINEAR: Final = "all-linear"
Modules = tuple[str, ...] | str


class LoraOptions(Section):
    """The options that decide an adapter's tensors and its product: y = W x + b + scale B A x.

    A module is named as in the base's files, without ".weight": model.layers.0.self_attn.q_proj.

    Attributes:
        rank: the number of rows of A, unless `rank_pattern` has another one.
        alpha: scale is alpha / rank, or with `rslora` alpha / sqrt(rank) (arXiv 2312.03732).
        dropout: the share of A's inputs that a training step leaves out; the others grow by 1 / (1 - dropout). Adapters
            of experts have none.
        targets: the modules with an adapter: names, or the ends of names after a dot ("q_proj"); or one regular
            expression that whole names match; or "all-linear", every linear layer except routers and the head.
        exclude: modules without one although they are targets, as names or a regular expression.
        rank_pattern, alpha_pattern: the values of modules; a key is a regular expression for a name or its end.
        bias: the base's biases that are trained: "none", "all", or "lora_only", those of modules with an adapter.
        modules_to_save: modules of the base that are trained whole and belong to the adapter; the ends of names.
    """

    rank: int = Field(default=16, ge=1, le=2**14)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Modules = ALL_LINEAR
    exclude: Modules = ()
    rank_pattern: Mapping[str, int] = Field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = Field(default_factory=dict)
    rslora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: tuple[str, ...] = ()

    @field_validator("targets", "exclude", "modules_to_save", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("targets", "exclude"):
            value = getattr(self, key)
            if isinstance(value, str) and value != ALL_LINEAR:
                _check_pattern(key, value)
        if not self.targets:
            raise ValueError(f'targets is empty: name modules ("q_proj"), or write "{ALL_LINEAR}"')
        patterns: dict[str, Mapping[str, Any]] = {
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        }
        for key, values in patterns.items():
            for pattern, value in values.items():
                _check_pattern(key, pattern)
                if value <= 0:
                    raise ValueError(f"{key}: {pattern!r} = {value} must be above 0")
        return self


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from error
