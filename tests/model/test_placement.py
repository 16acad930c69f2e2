"""The layers of one rank: shapes at a given place in the layout, without any process."""

import pytest
import torch

from tk.core.errors import ParallelError
from tk.core.layout import Stage
from tk.model.norm import LayerNorm, RMSNorm
from tk.model.placement import Placement
from tk.model.recompute import Recompute
from tk.model.registry import decoder_spec
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import Group
from tk.tests.model.decoders import config_of

WHOLE = Stage(range(3))
ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"


def place(
    name: str, rank: int = 0, size: int = 1, stage: Stage = WHOLE, recompute: Recompute = "none", tied: bool = False
) -> Placement:
    """Returns the place of tensor-parallel rank `rank` of `size`: hidden size 64, 8 heads of 8, 2 kv heads, D = 96."""
    spec = decoder_spec(config_of(name, tie_word_embeddings=tied))
    return Placement(spec, LayerContext(Group(None, rank, size), torch.bfloat16, torch.device("cpu")), stage, recompute)


@pytest.mark.parametrize(("size", "qkv", "gate_up", "o", "down"), [(1, 96, 192, 64, 96), (2, 48, 96, 32, 48)])
def test_columns_and_rows_are_those_of_the_rank(size: int, qkv: int, gate_up: int, o: int, down: int) -> None:
    mine = place("llama3", size - 1, size)
    assert mine.column(f"{ATTENTION}.qkv_proj").weight.shape == (qkv, 64)
    assert mine.column(f"{MLP}.gate_up_proj").weight.shape == (gate_up, 64)
    assert mine.row(f"{ATTENTION}.o_proj").weight.shape == (64, o)
    assert mine.row(f"{MLP}.down_proj").weight.shape == (64, down)
    assert mine.row(f"{MLP}.down_proj").weight.dtype == torch.bfloat16


def test_kv_heads_are_repeated_where_there_are_more_ranks() -> None:
    assert place("llama3", 3, 4).column(f"{ATTENTION}.qkv_proj").weight.shape == (2 * 8 + 8 + 8, 64)


def test_a_layer_has_a_bias_if_the_table_has_one() -> None:
    column = place("qwen2", size=2).column(f"{ATTENTION}.qkv_proj")
    assert column.bias is not None
    assert column.bias.shape == (48,)
    assert place("qwen2").row(f"{ATTENTION}.o_proj").bias is None
    assert place("llama3").column(f"{ATTENTION}.qkv_proj").bias is None


def test_gpt2s_weights_are_stored_as_in_and_out() -> None:
    mine = place("gpt2", 1, 2)
    column, row = mine.column(f"{ATTENTION}.qkv_proj"), mine.row(f"{MLP}.down_proj")
    assert column.weight.shape == (3 * 64, 64 // 2), "a block each for q, k and v"
    assert column.product.num_transposed == 3
    assert row.weight.shape == (4 * 64 // 2, 64)
    assert row.product.num_transposed == 1
    assert row.bias is not None


def test_norms_are_those_of_the_architecture() -> None:
    assert isinstance(place("llama3").norm(), RMSNorm)
    assert isinstance(place("gpt2").norm(), LayerNorm)
    head_norm = place("qwen3").head_norm(f"{ATTENTION}.q_norm")
    assert head_norm is not None
    assert head_norm.weight.shape == (24,)
    assert place("llama3").head_norm(f"{ATTENTION}.q_norm") is None


def test_every_rank_has_as_many_rows_of_the_vocabulary() -> None:
    for rank in (0, 1):
        assert place("llama3", rank, 2).embedding().weight.shape == (51, 64)  # 101 rows and one of padding
    assert place("gpt2").empty("model.embed_positions.weight").shape == (64, 64)


def test_a_tied_head_is_the_embedding_only_on_its_stage() -> None:
    mine = place("qwen2", tied=True)
    embedding = mine.embedding()
    assert mine.head(embedding).weight is embedding.weight
    last = place("qwen2", tied=True, stage=Stage(range(1, 3), first=False))
    head = last.head(None).weight
    assert (head.shape, head.device.type) == ((101, 64), "cpu")
    untied = place("llama3")
    assert untied.head(embedding).weight is not embedding.weight


def test_a_stage_holds_its_layers_alone() -> None:
    middle = place("llama3", stage=Stage(range(1, 2), first=False, last=False))
    assert {name.split(".")[2] for name in middle.shapes} == {"1"}
    assert len(middle.params) == 6, "two norms, qkv, o, gate and up, down"


def test_only_selective_recomputation_repeats_activations() -> None:
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    found = [place("llama3", recompute=kind).row(f"{MLP}.down_proj").recompute_activation for kind in kinds]
    assert found == [False, True, False]


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(ParallelError, match="num_attention_heads % tp = 8 % 3 = 2"):
        _ = place("llama3", 0, 3).params
