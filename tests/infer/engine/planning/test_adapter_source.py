"""Adapters before they are loaded: what is refused, by name, and digests that differ where answers may."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError, ConfigError, ShapeMismatch
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning import memory_plan
from tk.infer.engine.planning.adapter_source import AdapterSource, with_room
from tk.infer.engine.planning.memory_plan import plan_memory
from tk.model.config import ModelConfig
from tk.model.stored_config import stored_config
from tk.tests.infer.adapters import OWN, make_adapter
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
        ("llama3", {"change": spoilt}, r"layers.1.self_attn.k_proj.lora_A.weight holds NaN or an infinity"),
        (
            "llama3",
            {"modules_to_save": ("lm_head",)},
            r"has a head of its own .* max_adapter_heads is 0.* takes .* KiB",
        ),
        ("llama3", {"modules_to_save": ("embed_tokens",)}, r"holds model.embed_tokens.weight, trained whole"),
        ("llama3", {"modules_to_save": ("1.mlp.down_proj",)}, r"layers.1.mlp.down_proj.weight, trained whole"),
        ("gpt2", {"modules_to_save": ("wpe",)}, r"holds transformer.wpe.weight, trained whole \(modules_to_save\)"),
        (
            "mixtral",
            {"modules_to_save": ("gate",), "targets": ("q_proj",)},
            r"holds model.layers.0.block_sparse_moe.gate.weight, trained whole",
        ),
        ("mixtral", {}, r"has factors of experts, and max_adapter_experts is 0.* of rank 16 take .*B on each of 1"),
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
        ({"tie_word_embeddings": True}, "lm_head is tied to model.embed_tokens in this model.* Leave both out"),
        ({"intermediate_size": 40}, r"mlp.gate_proj.lora_B.weight has shape \[.*\], but its base and rank require"),
    ],
)
def test_an_adapter_of_a_model_of_another_shape_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    ENTRIES["llama3"].make(tmp_path / "base")
    adapter = make_adapter(tmp_path / "run", tmp_path / "base", rank=4, modules_to_save=("lm_head",))
    with pytest.raises(ShapeMismatch, match=message):
        opened(tmp_path / "base", adapter, **changes)


def test_experts_are_counted_where_an_adapter_has_them(tmp_path: Path) -> None:
    base = tmp_path / "base"
    ENTRIES["mixtral"].make(base)
    adapter, config = make_adapter(tmp_path / "run", base, rank=4), stored_config(Checkpoint.open(base))
    attention = make_adapter(tmp_path / "attention", base, rank=4, targets=("q_proj",))
    none = EngineOptions(base, adapters={"a": attention}, max_adapters=2, max_adapter_rank=16, kv_blocks=4)
    found = with_room(replace(none, adapters={"a": attention, "b": adapter}), config)
    plans = [plan_memory(config, each, "fp32", "fp32") for each in (none, with_room(none, config), found)]
    assert [each.max_adapter_experts for each in plans] == [0, 0, 2]
    assert plans[0].adapter_bytes == plans[1].adapter_bytes == plans[2].adapter_bytes - 3 * plans[2].expert_bytes
    factors = 3 * 4 * 4 * (3 * 16 * (64 + 96))  # bytes: layers, experts, values; pairs of a rank, inputs and outputs
    assert factors < plans[2].expert_bytes < 4 * factors
    source = AdapterSource.open(adapter, Checkpoint.open(base), config, plans[2])
    assert (source.has_head, source.has_experts) == (False, True)


@pytest.mark.parametrize(
    ("given", "names", "expected"), [(None, "a", 0), (None, "ab", 4), (1, "ab", 1), (0, "b", 0), (9, "", 9)]
)
def test_all_adapters_may_have_a_head_if_one_has_it_at_start(
    tmp_path: Path, given: int | None, names: str, expected: int
) -> None:
    base = tmp_path / "base"
    ENTRIES["llama3"].make(base)
    paths = {"a": make_adapter(tmp_path / "a", base, rank=4), "b": make_adapter(tmp_path / "b", base, **OWN["llama3"])}
    options = EngineOptions(
        base, adapters={name: paths[name] for name in names}, max_adapters=4, max_adapter_heads=given
    )
    found = with_room(options, stored_config(Checkpoint.open(base)))
    assert found.max_adapter_heads == expected


def test_heads_that_do_not_fit_are_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    ENTRIES["llama3"].make(base)
    config, none = stored_config(Checkpoint.open(base)), EngineOptions(base, max_adapters=3, kv_blocks=4)
    plans = [plan_memory(config, replace(none, max_adapter_heads=heads), "bf16", "bf16") for heads in (None, 0, 2, 9)]
    head = 2 * 112 * 64  # bf16, 101 rows padded to 112
    assert [each.adapter_bytes - plans[0].adapter_bytes for each in plans] == [0, 0, 3 * head, 4 * head], (
        "the next one's, too"
    )
    assert "up to 3 of rank 64, and the next of one; 2 with a head of 14 KiB" in plans[2].table()
    monkeypatch.setattr(memory_plan, "free_memory", lambda: plans[0].total_bytes)
    with pytest.raises(ConfigError, match=r"4 adapters of rank 64, 3 with heads \(.*\),.* or max_adapter_heads, or"):
        plan_memory(config, replace(none, max_adapter_heads=2), "bf16", "bf16")


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
