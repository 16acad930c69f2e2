"""A run of a small model, for plans of offload."""

from collections.abc import Sequence
from typing import Any

from tk.core.config import parse
from tk.core.layout import Layout
from tk.core.local_params import LocalParam, local_params
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.tests.train.planning.small_models import MODELS
from tk.train.config.freezing import without_frozen
from tk.train.config.tensor_slots import with_run_slots
from tk.train.config.train_config import TrainConfig

LLAMA = MODELS["llama"] | {"hidden_size": 256, "intermediate_size": 640}


def small_run(
    dp: int, zero: int, params: str, freeze: Sequence[str] = (), **offload: Any
) -> tuple[TrainConfig, Layout, tuple[LocalParam, ...]]:
    """Returns a run of a small Llama with its layout and the parameters of its first rank."""
    text = {
        "model": LLAMA,
        "train": {"seq_len": 32, "freeze": list(freeze)},
        "parallel": {"dp": dp},
        "zero": {"stage": zero, "bucket_size": 400_000},
        "precision": {"params": params},
        "offload": offload,
        "checkpoint": {"dir": "run"},
    }
    config = parse(text, TrainConfig, "test")
    layout = config.layout(None)
    table = without_frozen(decoder_spec(ModelConfig(**LLAMA)).table, freeze)
    table = with_run_slots(table, config.precision.params, config.optimizer)
    return config, layout, local_params(table, layout, 0)
