"""The activations of experts on different ranks at worst: all tokens choose the experts of one rank (no torch)."""

from typing import Final

from ...core.layout import Stage
from ...model.experts.exchange_plan import HEADROOM
from ...model.spec import ExpertsSpec
from .activation_memory import PassShape

_KEPT: Final = 5  # times the inner size: gate and up, the contiguous gate, silu(gate), the product


def worst_bytes(shape: PassShape, stage: Stage, in_flight: int) -> int:
    """Returns the bytes by which a rank that gets all tokens of its ep ranks exceeds one that gets as many as others.

    Without recomputation it keeps what each of its experts computes for each token. Else it computes in rounds, each of
    which backward runs again by itself, so that only one has its values at once: it is at most HEADROOM times as large
    as the tokens of a rank at balance, which "full" has at once, too.

    Args:
        shape: the sizes of a forward pass.
        stage: the layers.
        in_flight: the number of micro-batches whose activations the rank keeps.
    """
    blocks = [shape.spec.layers[layer].feed_forward for layer in stage.layers]
    sizes = [_pair_bytes(shape, block) for block in blocks if isinstance(block, ExpertsSpec)]
    if shape.experts is None or shape.experts.ep == 1 or not sizes:
        return 0
    if shape.recompute == "none":
        return (shape.experts.ep - 1) * sum(sizes) * in_flight
    return round((HEADROOM - (shape.recompute == "full")) * max(sizes))


def _pair_bytes(shape: PassShape, block: ExpertsSpec) -> int:
    """Returns the bytes that the experts of a layer keep at balance: the tokens that they get, and inner values."""
    inner = block.inner // (shape.experts.tp if shape.experts else shape.tp)
    width = _KEPT * inner + shape.spec.hidden_size
    return shape.routed_tokens * block.top_k * width * shape.itemsize
