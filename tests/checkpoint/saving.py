"""A small model's tensors, values for them, and saving them at any layout without processes."""

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tk.checkpoint import NewStep, RunFolder, commit, write_part
from tk.core import dtypes
from tk.core.casts import Array, cast
from tk.core.layout import Layout
from tk.core.ownership import Owned, owned
from tk.core.tensors import Split, TensorSpec, with_slots

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


LLAMA = llama_table(layers=2, tied=False)
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def mixed_table(tied: bool = True) -> tuple[TensorSpec, ...]:
    """Four layers, each as hard as those of another architecture, between two ends of a vocabulary that no tp divides.

    Fewer kv heads than tp = 4 and 8 and fused rows (Llama), experts and their router (Mixtral), three column boxes a
    rank in one transposed tensor, and biases (GPT-2), a scalar.
    """
    hidden, inner, vocab, head = 32, 48, 101, 4
    kv, query = Split(0, head, "replicate", "num_key_value_heads"), Split(0, head)
    specs = [TensorSpec("model.embed_tokens.weight", (vocab, hidden), Split(0, rule="pad", of="vocab_size"))]
    specs += [
        TensorSpec("0.norm.weight", (hidden,), None, 0),
        TensorSpec("0.q_proj.weight", (hidden, hidden), query, 0, "0.qkv"),
        TensorSpec("0.k_proj.weight", (2 * head, hidden), kv, 0, "0.qkv"),
        TensorSpec("0.v_proj.weight", (2 * head, hidden), kv, 0, "0.qkv"),
        TensorSpec("0.o_proj.weight", (hidden, hidden), Split(1, head), 0),
        TensorSpec("1.gate.weight", (2, hidden), None, 1),
        *(
            TensorSpec(f"1.experts.{n}.w1.weight", (inner, hidden), Split(0), 1, f"1.w13.{n}", expert=n)
            for n in range(2)
        ),
        *(
            TensorSpec(f"1.experts.{n}.w3.weight", (inner, hidden), Split(0), 1, f"1.w13.{n}", expert=n)
            for n in range(2)
        ),
        *(TensorSpec(f"1.experts.{n}.w2.weight", (hidden, inner), Split(1), 1, expert=n) for n in range(2)),
        TensorSpec("2.c_attn.weight", (hidden, 3 * hidden), Split(1, head, sections=3), 2),
        TensorSpec("2.c_attn.bias", (3 * hidden,), Split(0, head, sections=3), 2),
        TensorSpec("2.c_proj.weight", (hidden, hidden), Split(0, head), 2),
        TensorSpec("2.c_proj.bias", (hidden,), None, 2),
        TensorSpec("3.up.weight", (inner, 7), Split(0), 3),
        TensorSpec("3.scale", (), None, 3),
        TensorSpec("norm.weight", (hidden,), None, "last"),
    ]
    tie = "model.embed_tokens.weight" if tied else ""
    return (*specs, TensorSpec("lm_head.weight", (vocab, hidden), Split(0, rule="pad"), "last", alias=tie))


def true_values(spec: TensorSpec, slot: str, code: str) -> Array:
    """The values of a slot, a function of names alone; the bf16 weight is the rounded master."""
    origin = "weight" if slot == "master" else slot
    rng = np.random.default_rng(zlib.crc32(f"{spec.name}/{origin}".encode()))
    values = np.asarray(rng.standard_normal(spec.shape, dtype=np.float32))
    return cast(values, dtypes.FP32, dtypes.by_code(code))


def cut(values: Array, item: Owned) -> Array:
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
    """Saves a step in which every tensor has these slots, frozen ones "weight" alone, as every rank in turn."""
    return save_table(run, with_slots(table, slots), layout, step, **more)


def save_table(run: Path, table: tuple[TensorSpec, ...], layout: Layout, step: int = 1, **more: object) -> Path:
    """Saves a step in which each tensor has its own slots, as every rank of `layout` in turn."""
    specs = {spec.name: spec for spec in table}
    codes = {(spec.name, slot): code for spec in table for slot, code in spec.slots.items()}
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(step)
        for rank in range(layout.world_size):
            items = [(item, codes[item.tensor, item.slot]) for item in owned(table, layout, rank)]
            entries = [
                (item, code, lambda item=item, code=code: cut(true_values(specs[item.tensor], item.slot, code), item))
                for item, code in items
            ]
            write_part(folder, rank, table, entries)
        return commit(locked, NewStep(step, table, layout, **more))  # type: ignore[arg-type]


def assert_equal(found: Array, wanted: Array) -> None:
    """Bit for bit, NaN included."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()
