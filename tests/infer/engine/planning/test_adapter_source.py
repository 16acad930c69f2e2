"""Adapters before they are loaded: what is refused, by name, and digests that differ where answers may."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError, ShapeMismatch
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.adapter_source import AdapterSource
from tk.infer.engine.planning.memory_plan import plan_memory
from tk.model.config import ModelConfig
from tk.model.stored_config import stored_config
from tk.tests.infer.adapters import make_adapter
from tk.tests.model.architectures import ENTRIES


def opened(base: Path, adapter: Path, dtype: str = "fp32", **changes: Any) -> AdapterSource:
    """Opens an adapter for a base, with changes of its config, that is served with adapters up to rank 16."""
    checkpoint = Checkpoint.open(base)
    config = ModelConfig.model_validate(stored_config(checkpoint).model_dump() | changes)
    options = EngineOptions(base, max_adapters=1, max_adapter_rank=16, kv_blocks=4)
    return AdapterSource.open(adapter, checkpoint, config, plan_memory(config, options, dtype, dtype))


def spoilt(name: str, values: Any) -> Any:
    """Returns values of which one factor's are NaN."""
    return values * np.nan if "layers.1.self_attn.k_proj.lora_A" in name else values


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama3", {"rank": 17}, "has factors of rank 17, and max_adapter_rank is 16"),
        ("llama3", {"identity": "ab" * 32}, "is an adapter of another base"),
        ("llama3", {"change": spoilt}, r"layers.1.self_attn.k_proj.lora_A.weight has a value that is not finite"),
        ("llama3", {"modules_to_save": ("model.norm",)}, r"holds model.norm.weight, a tensor of the base that was"),
        ("mixtral", {}, r"holds model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight, a factor of an expert"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    ENTRIES[name].make(tmp_path / "base")
    adapter = make_adapter(tmp_path / "run", tmp_path / "base", **{"rank": 4} | options)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "base", adapter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "holds model.layers.2.self_attn.q_proj.lora_A.weight, which meets no module"),
        ({"intermediate_size": 40}, r"mlp.gate_proj.lora_B.weight has shape \[.*\], but its base and rank require"),
    ],
)
def test_an_adapter_of_a_model_of_another_shape_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    ENTRIES["llama3"].make(tmp_path / "base")
    adapter = make_adapter(tmp_path / "run", tmp_path / "base", rank=4)
    with pytest.raises(ShapeMismatch, match=message):
        opened(tmp_path / "base", adapter, **changes)


def test_the_digest_is_of_configuration_and_values(tmp_path: Path) -> None:
    base = tmp_path / "base"
    ENTRIES["llama3"].make(base)
    made: dict[str, dict[str, Any]] = {
        "first": {},
        "values": {"seed": 1},
        "scale": {"alpha": 5.0},
        "again": {},
        "one": {"targets": ("q_proj",)},
    }
    digests = {
        name: opened(base, make_adapter(tmp_path / name, base, **{"rank": 4} | options)).digest
        for name, options in made.items()
    }
    assert digests["first"] == digests["again"]
    assert len(set(digests.values())) == 4
    assert opened(base, tmp_path / "first", "bf16").digest != digests["first"]
