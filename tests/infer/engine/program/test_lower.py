"""The lowering: every parameter is used once, sizes follow tp, and the number of slices is the same at every tp."""

import dataclasses

import pytest

from tk.core.errors import ParallelError
from tk.infer.engine.program.lower import Program, lower, serving_slices
from tk.infer.engine.program.operations import (
    AttendToCache,
    Embed,
    Head,
    Multiply,
    Reduce,
    RotateAndAppend,
    Route,
    RunExperts,
    WeightMatrix,
)
from tk.model.config import ModelConfig
from tk.model.registry import architectures, decoder_spec
from tk.model.row_slices import most_slices
from tk.model.spec import EMBEDDING, DecoderSpec

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 48}


def spec_of(architecture: str, **options: object) -> DecoderSpec:
    return decoder_spec(ModelConfig.model_validate({"architecture": architecture, **SIZES, **options}))


def used(program: Program) -> list[str]:
    """Returns the names of the parameters in a program's operations, in order."""
    names: list[str] = []
    for operation in program.operations:
        for field in dataclasses.fields(operation):
            value = getattr(operation, field.name)
            if isinstance(value, WeightMatrix):
                names += [value.name, value.bias]
            elif isinstance(value, str) and value.startswith("model."):
                names.append(value)
    return [name for name in names if name]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("architecture", sorted(architectures()))
def test_every_parameter_is_used_once(architecture: str, tp: int) -> None:
    program = lower(spec_of(architecture, tie_word_embeddings=False), tp, tp - 1)
    assert sorted(used(program)) == sorted(param.name for param in program.params)


def test_a_tied_head_is_the_embedding() -> None:
    program = lower(spec_of("llama", tie_word_embeddings=True))
    head = next(each for each in program.operations if isinstance(each, Head))
    assert head.matrix == WeightMatrix(EMBEDDING, in_features=32, out_features=50)


def test_sizes_are_those_of_a_rank() -> None:
    program = lower(spec_of("llama", num_key_value_heads=2, num_hidden_layers=1), tp=4, rank=1, num_slices=8)
    assert (program.num_heads, program.num_kv_heads, program.head_dim) == (2, 1, 4)
    linears = {
        each.target: each for each in program.operations if isinstance(each, Multiply) and each.source != "gated"
    }
    assert (linears["qkv"].matrix.in_features, linears["qkv"].matrix.out_features) == (32, (2 + 1 + 1) * 4)
    assert (linears["partial"].matrix.in_features, linears["partial"].num_slices) == (8, 2)
    embed = program.operations[0]
    assert isinstance(embed, Embed)
    assert embed.num_rows == 13  # 50 rows, padded to 52


def test_gpt2_has_transposed_weights_and_biases() -> None:
    program = lower(spec_of("gpt2"), tp=2)
    qkv = next(each for each in program.operations if isinstance(each, Multiply))
    assert qkv.matrix == WeightMatrix(
        "model.layers.0.self_attn.qkv_proj.weight", 32, 48, 3, "model.layers.0.self_attn.qkv_proj.bias"
    )
    reduce = next(each for each in program.operations if isinstance(each, Reduce))
    assert reduce.bias == "model.layers.0.self_attn.o_proj.bias"
    assert program.rope is None


def test_experts_and_windows_follow_the_layers() -> None:
    options = {"mlp_only_layers": (0,), "num_hidden_layers": 2, "moe_intermediate_size": 16, "sliding_window": 7}
    program = lower(spec_of("qwen3_moe", **options), tp=2)
    kinds = [
        type(each).__name__ for each in program.operations if isinstance(each, Route | RunExperts) or each == Reduce()
    ]
    assert kinds == ["Reduce", "Reduce", "Reduce", "Route", "RunExperts", "Reduce"]
    experts = next(each for each in program.operations if isinstance(each, RunExperts))
    assert (experts.num_experts, experts.inner) == (8, 8)
    assert {each.window for each in program.operations if isinstance(each, AttendToCache)} == {7}
    append = next(each for each in program.operations if isinstance(each, RotateAndAppend))
    assert append.q_norm == "model.layers.0.self_attn.q_norm.weight"


def test_a_shared_expert_follows_the_experts_on_the_same_rows() -> None:
    options = {"num_hidden_layers": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    program = lower(spec_of("qwen2_moe", **options), tp=2)
    experts = next(i for i, each in enumerate(program.operations) if isinstance(each, RunExperts))
    reduce, gate_up, _, down, shared, *_ = program.operations[experts + 1 :]
    prefix = "model.layers.0.mlp.shared_expert"
    assert reduce == Reduce()
    assert gate_up == Multiply("normed", "inner", WeightMatrix(f"{prefix}.gate_up_proj.weight", 32, 24))
    assert down == Multiply("gated", "partial", WeightMatrix(f"{prefix}.down_proj.weight", 12, 32))
    assert shared == Reduce(gate=f"{prefix}_gate.weight")
    assert program.row_widths["inner"] == 24


def test_buffers_are_as_wide_as_the_widest_block() -> None:
    for wide in ({"intermediate_size": 80}, {"shared_expert_intermediate_size": 80}):
        sizes = {"mlp_only_layers": (1,), "num_hidden_layers": 2, "shared_expert_intermediate_size": 40} | wide
        widths = lower(spec_of("qwen2_moe", **sizes)).row_widths
        assert (widths["inner"], widths["gated"]) == (160, 80)


def test_a_shared_expert_counts_among_the_intermediate_sizes() -> None:
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 20}
    assert most_slices(spec_of("qwen2_moe", **sizes)) == 4


@pytest.mark.parametrize(("heads", "inner", "slices"), [(8, 48, 8), (12, 2048, 4), (9, 1536, 1), (16, 20, 4)])
def test_slices_divide_heads_and_intermediate_sizes(heads: int, inner: int, slices: int) -> None:
    config = {"num_attention_heads": heads, "intermediate_size": inner, "hidden_size": 16 * heads}
    assert most_slices(spec_of("llama", **config)) == slices


@pytest.mark.parametrize(
    ("heads", "inner", "tp", "dtype", "slices"),
    [
        (8, 96, 1, "fp32", 8),
        (8, 96, 8, "fp32", 8),
        (4, 96, 2, "fp32", 4),
        (4, 97, 2, "fp32", 1),  # no number of slices divides the intermediate size
        (12, 96, 3, "fp32", 1),  # a tp that is no power of two
        (8, 96, 2, "bf16", 1),
    ],
)
def test_sums_are_served_in_slices_that_fit_model_and_tp(
    heads: int, inner: int, tp: int, dtype: str, slices: int
) -> None:
    config = {"num_attention_heads": heads, "intermediate_size": inner, "hidden_size": 8 * heads}
    assert serving_slices(spec_of("llama", **config), tp, dtype) == slices


def test_a_tp_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ParallelError, match="num_attention_heads % tp"):
        lower(spec_of("llama"), tp=3)
