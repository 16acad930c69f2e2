"""The frequencies of rotary position embedding (RoFormer, arXiv 2104.09864) in plain numbers."""

import math

from ....model.shape import RopeScaling
from ....model.spec import Rope


def frequencies(rope: Rope, head_dim: int) -> list[float]:
    """Returns the radians per position of each pair (d, d + head_dim / 2), as fp64."""
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    return plain if rope.scaling is None else [_scale(each, rope.scaling) for each in plain]


def _scale(frequency: float, scaling: RopeScaling) -> float:
    """Scales a frequency as Llama 3 does: slow rotations are slowed by `factor`, fast ones kept, others in between."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # in the context of pretraining
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = min(1.0, max(0.0, kept))
    return frequency * (kept + (1 - kept) / scaling.factor)
