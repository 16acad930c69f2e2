"""The tensors of Llama's relatives, listed by hand."""

from typing import Any

from tk.core.tensors import Split
from tk.model.llama_family import Family, Names
from tk.model.shape import ModelShape
from tk.model.spec import DenseSpec, ExpertsSpec, LayerSpec
from tk.tests.model.tiny_llama import TINY_LLAMA

SHAPE = ModelShape(**TINY_LLAMA | {"num_hidden_layers": 1, "head_dim": 6})
LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"


def shapes(family: Family, **changes: Any) -> dict[str, tuple[int, ...]]:
    """Returns the stored tensors of a decoder of one layer, in their order."""
    return {spec.name: spec.shape for spec in family.decoder(SHAPE.model_copy(update=changes)).table}


def test_llama_has_these_tensors() -> None:
    found = shapes(Family())
    assert found == {
        "model.embed_tokens.weight": (101, 32),
        f"{LAYER}.input_layernorm.weight": (32,),
        f"{ATTENTION}.q_proj.weight": (24, 32),
        f"{ATTENTION}.k_proj.weight": (12, 32),
        f"{ATTENTION}.v_proj.weight": (12, 32),
        f"{ATTENTION}.o_proj.weight": (32, 24),
        f"{LAYER}.post_attention_layernorm.weight": (32,),
        f"{LAYER}.mlp.gate_proj.weight": (48, 32),
        f"{LAYER}.mlp.up_proj.weight": (48, 32),
        f"{LAYER}.mlp.down_proj.weight": (32, 48),
        "model.norm.weight": (32,),
        "lm_head.weight": (101, 32),
    }
    names = list(found)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"
    assert names.index(f"{ATTENTION}.v_proj.weight") < names.index(f"{ATTENTION}.o_proj.weight")


def test_tensor_parallelism_cuts_heads_and_the_intermediate_size() -> None:
    table = {spec.name: spec for spec in Family().decoder(SHAPE).table}
    attention = {name: table[f"{ATTENTION}.{name}_proj.weight"] for name in "qkvo"}
    assert attention["q"].split == Split(0, 6, "exact", of="num_attention_heads")
    assert attention["k"].split == attention["v"].split == Split(0, 6, "replicate", of="num_key_value_heads")
    assert attention["o"].split == Split(1, 6, "exact", of="num_attention_heads")
    assert {attention[name].param for name in "qkv"} == {f"{ATTENTION}.qkv_proj.weight"}
    gate, up, down = (table[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert gate.split == up.split == Split(0, of="intermediate_size")
    assert down.split == Split(1, of="intermediate_size")
    assert gate.param == up.param == f"{LAYER}.mlp.gate_up_proj.weight"
    assert table["model.embed_tokens.weight"].split == Split(0, 1, "pad", of="vocab_size")
    assert table[f"{LAYER}.input_layernorm.weight"].split is None


def test_relatives_differ_by_biases_head_norms_and_a_tied_head() -> None:
    llama = shapes(Family())
    biased = shapes(Family(qkv_bias=True))
    assert {name: biased[name] for name in biased if name not in llama} == {
        f"{ATTENTION}.q_proj.bias": (24,),
        f"{ATTENTION}.k_proj.bias": (12,),
        f"{ATTENTION}.v_proj.bias": (12,),
    }
    normed = Family(head_norms=True).decoder(SHAPE).table
    extra = [spec for spec in normed if spec.name not in llama]
    assert [(spec.name, spec.shape) for spec in extra] == [
        (f"{ATTENTION}.q_norm.weight", (6,)),
        (f"{ATTENTION}.k_norm.weight", (6,)),
    ]
    assert all(spec.partial_grad and spec.init == "ones" for spec in extra), "each rank sees only its own heads"
    tied = Family().decoder(SHAPE.model_copy(update={"tie_word_embeddings": True})).table[-1]
    assert (tied.name, tied.alias) == ("lm_head.weight", "model.embed_tokens.weight")


def test_experts_are_stored_one_by_one_and_held_in_two_parameters() -> None:
    family = Family(expert_names=Names("block_sparse_moe", "w1", "w3", "w2"))
    experts = ExpertsSpec(inner=20, num_experts=3, top_k=2, normalize=True)
    table = family.decoder(SHAPE, [LayerSpec(experts)]).table
    stored = f"{LAYER}.block_sparse_moe"
    found = {spec.name: (spec.shape, spec.param) for spec in table if spec.name.startswith(stored)}
    gate_up, down = f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj"
    expected: dict[str, Any] = {f"{stored}.gate.weight": ((3, 32), f"{LAYER}.mlp.gate.weight")}
    for expert in range(3):
        expected[f"{stored}.experts.{expert}.w1.weight"] = ((20, 32), gate_up)
        expected[f"{stored}.experts.{expert}.w3.weight"] = ((20, 32), gate_up)
        expected[f"{stored}.experts.{expert}.w2.weight"] = ((32, 20), down)
    assert found == expected
    assert next(spec for spec in table if spec.name == f"{stored}.gate.weight").partial_grad


def test_a_shared_expert_is_split_like_a_dense_block_and_its_gate_is_whole() -> None:
    experts = ExpertsSpec(inner=20, num_experts=3, top_k=2, normalize=True, shared=DenseSpec(28))
    for family, gated in (
        (Family(shared_gate=True), True),
        (Family(expert_names=Names(shared="shared_experts")), False),
    ):
        stored, own = f"{LAYER}.mlp.{family.expert_names.shared}", f"{LAYER}.mlp.shared_expert"
        table = {spec.name: spec for spec in family.decoder(SHAPE, [LayerSpec(experts)]).table}
        gate, up, down = (table[f"{stored}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert gate.split == up.split == Split(0, of="intermediate size of the shared expert")
        assert gate.param == up.param == f"{own}.gate_up_proj.weight"
        assert (down.shape, down.split, down.param) == (
            (32, 28),
            Split(1, of="intermediate size of the shared expert"),
            f"{own}.down_proj.weight",
        )
        weight = table.get(f"{stored}_gate.weight")
        assert (weight is not None) == gated
        assert weight is None or (weight.shape, weight.split, weight.partial_grad) == ((1, 32), None, True)


def test_layers_attend_in_the_window_of_the_shape_or_as_given() -> None:
    shape = SHAPE.model_copy(update={"num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 2})
    assert [layer.window for layer in Family().decoder(shape).layers] == [None, None, 8]
    experts = LayerSpec(ExpertsSpec(inner=20, num_experts=3, top_k=2, normalize=True), window=5)
    assert [layer.window for layer in Family().decoder(shape, [experts] * 3).layers] == [5, 5, 5]
