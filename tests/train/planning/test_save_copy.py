"""The copy for saves has all slots but those that a save reads from a file."""

import math
from typing import Any

import pytest

from tk.core.config import parse
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.tests.train.planning.small_models import MODELS
from tk.train.config.tensor_slots import with_run_slots
from tk.train.config.train_config import TrainConfig
from tk.train.planning.save_copy import save_copy_bytes


@pytest.mark.parametrize(("tier", "per_param"), [("none", 2 + 12), ("cpu", 2 + 12), ("disk", 2)])
def test_states_on_disk_are_not_copied(tier: str, per_param: int) -> None:
    text: dict[str, Any] = {"model": MODELS["llama"], "train": {"seq_len": 32}, "precision": {"params": "bf16"}}
    text |= {"offload": {"optimizer": tier}, "checkpoint": {"dir": "run", "every": 5}}
    config = parse(text, TrainConfig, "test")
    declared = decoder_spec(ModelConfig(**MODELS["llama"])).table
    table = with_run_slots(declared, config.precision.params, config.optimizer)
    total = sum(math.prod(spec.shape) for spec in table if not spec.alias)
    assert save_copy_bytes(config, table, config.layout(None), 0) == pytest.approx(per_param * total, rel=0.02)
