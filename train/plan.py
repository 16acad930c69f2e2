"""What a run will be, from its configuration alone: printed by `tk train --dry-run`. No torch, no processes."""

from collections.abc import Sequence

from ..core.layout import Layout, LocalParam, buckets
from ..core.progress import format_bytes
from ..model.registry import count_parameters
from .config import TrainConfig


def model_state_bytes(config: TrainConfig, layout: Layout, params: Sequence[LocalParam]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states on the fullest rank, padding included."""
    elements = sum(bucket.size for bucket in buckets(params, layout))
    low_precision = config.precision.params != "fp32"
    states = 12 if low_precision else 8  # exp_avg, exp_avg_sq, and the fp32 master of a low-precision parameter
    return {
        "parameters": elements * (2 if low_precision else 4),
        "gradients": elements * 4,
        "optimizer": elements * states // layout.group_size,
    }


def describe(config: TrainConfig, layout: Layout, params: Sequence[LocalParam]) -> str:
    """The plan in words, one line per fact."""
    vocab_size = config.model.vocab_size or config.data.vocab_size
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    tokens = config.train.steps * config.train.global_batch_size * config.train.seq_len
    memory = model_state_bytes(config, layout, params)
    lines = [
        f"model      {model.architecture}, {count_parameters(model):,} parameters, vocabulary {vocab_size}",
        f"layout     tp {layout.tp} x dp {layout.dp} = {layout.world_size} ranks, ZeRO-{layout.zero}",
        f"training   {config.train.steps} steps x {config.train.global_batch_size} rows x {config.train.seq_len} = "
        f"{tokens:,} tokens in {config.precision.params}",
        "per rank   " + ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items()),
        f"run folder {config.run_folder}",
    ]
    return "\n".join(lines)
