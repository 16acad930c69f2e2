"""A small model's tensors, values for them, and saving them at any layout without processes."""

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tk.checkpoint import RunFolder, commit, write_part
from tk.core import dtypes
from tk.core.layout import Layout, Owned, Split, TensorSpec, owned

STATES = {"weight": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
MIXED = {"weight": "BF16", "master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}


def llama_table(
    hidden: int = 32,
    inner: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 101,
    layers: int = 4,
    tied: bool = True,
) -> tuple[TensorSpec, ...]:
    """A Llama's tensors with fused parameters, fewer kv heads than tp = 4, and a vocabulary that tp does not divide."""
    head = hidden // heads
    specs = [TensorSpec("model.embed_tokens.weight", (vocab, hidden), Split(0, rule="pad", of="vocab_size"))]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        qkv, gate_up = f"{at}.qkv", f"{at}.gate_up"
        kv = Split(0, head, "replicate", "num_key_value_heads")
        specs += [
            TensorSpec(f"{at}.input_layernorm.weight", (hidden,), None, layer),
            TensorSpec(f"{at}.self_attn.q_proj.weight", (hidden, hidden), Split(0, head), layer, qkv),
            TensorSpec(f"{at}.self_attn.k_proj.weight", (kv_heads * head, hidden), kv, layer, qkv),
            TensorSpec(f"{at}.self_attn.v_proj.weight", (kv_heads * head, hidden), kv, layer, qkv),
            TensorSpec(f"{at}.self_attn.o_proj.weight", (hidden, hidden), Split(1, head), layer),
            TensorSpec(f"{at}.post_attention_layernorm.weight", (hidden,), None, layer),
            TensorSpec(f"{at}.mlp.gate_proj.weight", (inner, hidden), Split(0), layer, gate_up),
            TensorSpec(f"{at}.mlp.up_proj.weight", (inner, hidden), Split(0), layer, gate_up),
            TensorSpec(f"{at}.mlp.down_proj.weight", (hidden, inner), Split(1), layer),
        ]
    specs.append(TensorSpec("model.norm.weight", (hidden,), layer="last"))
    tie = "model.embed_tokens.weight" if tied else ""
    specs.append(TensorSpec("lm_head.weight", (vocab, hidden), Split(0, rule="pad"), "last", alias=tie))
    return tuple(specs)


def true_values(spec: TensorSpec, slot: str, code: str) -> dtypes.Array:
    """The values of a slot, a function of names alone; the bf16 weight is the rounded master."""
    origin = "weight" if slot == "master" else slot
    rng = np.random.default_rng(zlib.crc32(f"{spec.name}/{origin}".encode()))
    values = rng.standard_normal(spec.shape, dtype=np.float32)
    return dtypes.cast(values, dtypes.FP32, dtypes.by_code(code))


def cut(values: dtypes.Array, item: Owned) -> dtypes.Array:
    """The elements of a whole tensor that an owner saves, 1-D."""
    boxed = np.ascontiguousarray(values[item.box.slices]).reshape(-1)
    return boxed if item.flat is None else boxed[slice(*item.flat)]


def save_step(
    run: Path,
    table: tuple[TensorSpec, ...],
    layout: Layout,
    slots: Mapping[str, str] = MIXED,
    step: int = 1,
    **more: object,
) -> Path:
    """Saves a step as every rank of `layout` in turn."""
    specs = {spec.name: spec for spec in table}
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(step)
        for rank in range(layout.world_size):
            entries = [
                (
                    item,
                    slots[item.slot],
                    lambda item=item: cut(true_values(specs[item.tensor], item.slot, slots[item.slot]), item),
                )
                for item in owned(table, layout, rank, list(slots))
            ]
            write_part(folder, rank, table, entries)
        return commit(folder, table, layout, step, slots=slots, **more)  # type: ignore[arg-type]


def assert_equal(found: dtypes.Array, wanted: dtypes.Array) -> None:
    """Bit for bit, NaN included."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()
