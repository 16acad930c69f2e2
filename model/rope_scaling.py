"""The scalings of rotary embedding for texts beyond the context of pretraining, with the keys of config.json.

Each is stated once, for torch's tensors in training and for numpy's fp64 arrays in serving. Letters: P pairs of a head.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar

from pydantic import Discriminator, Field, Tag, model_validator

from ..core.config import Section

if TYPE_CHECKING:
    import torch

    from ..core.casts import Array

Numbers = TypeVar("Numbers", "torch.Tensor", "Array")


class Scaling(Section):
    """A scaling, which slows rotations.

    Attributes:
        factor: the factor by which slow rotations are slowed.
    """

    factor: float = Field(gt=0)

    @property
    def attention_scaling(self) -> float:
        """The factor of all cosines and sines; products of queries and keys get its square."""
        return 1.0

    @abstractmethod
    def frequencies(self, periods_P: Numbers, pairs_P: Numbers, theta: float) -> Numbers:
        """Returns the radians per position of every pair.

        Args:
            periods_P: the positions per radian without scaling.
            pairs_P: the numbers of the pairs, from 0.
            theta: the base of the periods.
        """

    def context_length(self, max_position_embeddings: int) -> int:
        """Returns the length of the longest text."""
        return max_position_embeddings


class LinearScaling(Scaling):
    """Slows all rotations alike (position interpolation, arXiv 2306.15595).

    Attributes:
        rope_type: the name of the scaling.
    """

    rope_type: Literal["linear"] = "linear"

    def frequencies(self, periods_P: Numbers, pairs_P: Numbers, theta: float) -> Numbers:
        """See Scaling."""
        return 1.0 / periods_P / self.factor


class Llama3Scaling(Scaling):
    """Slows slow rotations, keeps fast ones, and slows others in part (Llama 3, arXiv 2407.21783).

    Attributes:
        rope_type: the name of the scaling.
        low_freq_factor: rotations with fewer turns per context of pretraining are slow.
        high_freq_factor: rotations with more turns per context of pretraining are kept.
        original_max_position_embeddings: the length of the context of pretraining.
    """

    rope_type: Literal["llama3"] = "llama3"
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float
    original_max_position_embeddings: int = Field(ge=1)

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor:g} must be greater than low_freq_factor = "
                f"{self.low_freq_factor:g}"
            )
        return self

    def frequencies(self, periods_P: Numbers, pairs_P: Numbers, theta: float) -> Numbers:
        """See Scaling."""
        plain_P = 1.0 / periods_P
        turns_P = self.original_max_position_embeddings * plain_P / (2 * math.pi)  # in the context of pretraining
        kept_P = ((turns_P - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clip(0, 1)
        return plain_P * (kept_P + (1 - kept_P) / self.factor)


class YarnScaling(Scaling):
    """YaRN (arXiv 2309.00071): as Llama 3's, but between slow and fast by the number of the pair; attention is scaled.

    A key without a value has the default of `transformers`.

    Attributes:
        rope_type: the name of the scaling.
        original_max_position_embeddings: the length of the context of pretraining.
        beta_fast: rotations with more turns per context of pretraining are kept.
        beta_slow: rotations with fewer turns per context of pretraining are slow.
        attention_factor: the factor of cosines and sines; None for the one that follows from the next two.
        mscale, mscale_all_dim: weights of the logarithm of `factor` in numerator and denominator of that factor; unless
            both are set, it is the paper's, 0.1 ln(factor) + 1.
        truncate: whether the first and last pair that are slowed in part are rounded to whole numbers.
    """

    rope_type: Literal["yarn"] = "yarn"
    original_max_position_embeddings: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    mscale: float | None = Field(default=None, ge=0)
    mscale_all_dim: float | None = Field(default=None, ge=0)
    truncate: bool = True

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast:g} must not be less than beta_slow = {self.beta_slow:g}")
        return self

    @property
    def attention_scaling(self) -> float:
        """See Scaling."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def frequencies(self, periods_P: Numbers, pairs_P: Numbers, theta: float) -> Numbers:
        """See Scaling; in fp32 bit-equal to `transformers`, also where a short context crosses the bounds."""
        low, high = self._bounds(2 * len(pairs_P), theta)
        kept_P = 1 - ((pairs_P - low) / (high - low)).clip(0, 1)
        found: Numbers = 1.0 / (self.factor * periods_P) * (1 - kept_P) + 1.0 / periods_P * kept_P
        return found

    def context_length(self, max_position_embeddings: int) -> int:
        """Returns the length of the longest text; cards of models leave max_position_embeddings as in pretraining."""
        return max(max_position_embeddings, int(self.factor * self.original_max_position_embeddings))

    def _magnitude(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def _bounds(self, dim: int, theta: float) -> tuple[float, float]:
        """Returns the last pair that is kept whole, and the first that is slowed whole."""
        low, high = (
            dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high + 0.001 if low == high else high  # they must differ, and transformers chooses by so much


def _tag(value: object) -> str:
    """Returns the member of the union that a value is; one without a type is Llama 3's, which once was alone."""
    kind = value.get("rope_type", "llama3") if isinstance(value, Mapping) else getattr(value, "rope_type", None)
    return f"<{kind}>"


RopeScaling = Annotated[
    Annotated[LinearScaling, Tag("<linear>")]
    | Annotated[Llama3Scaling, Tag("<llama3>")]
    | Annotated[YarnScaling, Tag("<yarn>")],
    Discriminator(
        _tag,
        custom_error_type="rope_type",
        custom_error_message="rope_type must be 'linear', 'llama3' or 'yarn'",
    ),
]
