"""The arithmetic that a run asks for, by formula (docs/training/metrics.md). No torch."""

from ...model.config import ModelConfig
from ...model.registry import count_multiplied


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Training flops per token: 6 per parameter that is multiplied, 6 layers x hidden x seq for causal attention."""
    return 6.0 * count_multiplied(config) + 6.0 * config.num_hidden_layers * config.hidden_size * seq_len
