"""The number of floating-point operations of a run, by formula (docs/training/metrics.md; no torch)."""

from dataclasses import replace

from ...model.registry import count_multiplied
from ...model.spec import DecoderSpec


def flops_per_token(decoder: DecoderSpec, seq_len: int) -> float:
    """Returns the flops per token: 6 per parameter of a matrix product, 6 layers x hidden x seq for causal attention.

    Forward and backward are counted, recomputation is not. A frozen parameter, which has no gradient, counts 4.
    """
    trained = replace(decoder, table=tuple(spec for spec in decoder.table if spec.trainable))
    multiplied = 4.0 * count_multiplied(decoder) + 2.0 * count_multiplied(trained)
    return multiplied + 6.0 * len(decoder.layers) * decoder.hidden_size * seq_len
