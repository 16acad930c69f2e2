"""The choice of experts by weight, bias and groups against GLM-4.5's in `transformers`, and the bits of the bias."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from tk.checkpoint import Checkpoint
from tk.core.layout import Stage
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.experts.router import Router
from tk.model.loading import load_weights
from tk.model.placement import Placement
from tk.model.registry import decoder_spec
from tk.model.spec import ExpertsSpec
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.tests.model.architectures import ENTRIES

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.gate"
BIAS = f"{NAME}.e_score_correction_bias"


def routers(dtype: torch.dtype, seed: int, **options: object) -> tuple[Router, Glm4MoeTopkRouter]:
    """Returns our router and that of `transformers` with the same weights and bias."""
    config = ModelConfig.model_validate(
        {"architecture": "glm4_moe", "vocab_size": 8, "num_local_experts": 12, "moe_intermediate_size": 8, **options}
    )
    spec = decoder_spec(config)
    rule = spec.layers[1].feed_forward
    assert isinstance(rule, ExpertsSpec)
    mine = Router(NAME, rule, Placement(spec, LayerContext(ALONE, dtype, CPU), Stage(range(4))))
    theirs = Glm4MoeTopkRouter(Glm4MoeConfig(**{"n_routed_experts": 12, "hidden_size": 256} | options)).to(dtype)
    random = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(12, 256, generator=random) / 16, torch.randn(12, generator=random) / 4
    theirs.e_score_correction_bias.data = bias
    with torch.no_grad():
        mine.weight.copy_(weight)
        theirs.weight.copy_(weight)
        assert mine.e_score_correction_bias is not None
        mine.e_score_correction_bias.copy_(bias)
    return mine, theirs


@given(
    groups=st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 2), (6, 5)]),
    top_k=st.integers(1, 4),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_experts_and_weights_are_those_of_transformers(
    groups: tuple[int, int], top_k: int, normalize: bool, scale: float, dtype: torch.dtype, seed: int
) -> None:
    options = {"n_group": groups[0], "topk_group": groups[1], "num_experts_per_tok": top_k, "norm_topk_prob": normalize}
    mine, theirs = routers(dtype, seed, routed_scaling_factor=scale, **options)
    x_TD = torch.randn(30, 256, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with torch.no_grad():
        choice, (_, weights, chosen) = mine(x_TD), theirs(x_TD)
    order, wanted = choice.chosen_TK.sort(dim=-1), chosen.sort(dim=-1)
    assert torch.equal(order.values, wanted.values)
    torch.testing.assert_close(choice.weights_TK.gather(1, order.indices), weights.gather(1, wanted.indices))
    torch.testing.assert_close(choice.probabilities_TE.sum(dim=-1), torch.ones(30))


def test_the_bias_decides_the_choice_and_not_the_weights() -> None:
    mine, _ = routers(torch.float32, 0, num_experts_per_tok=2)
    x_TD = torch.randn(30, 256, generator=torch.Generator().manual_seed(1))
    assert mine.e_score_correction_bias is not None
    with torch.no_grad():
        mine.e_score_correction_bias.zero_()[5] = 2.0  # more than any weight
        choice = mine(x_TD)
        weights_TE = (x_TD @ mine.weight.t()).sigmoid()
    assert (choice.chosen_TK == 5).any(dim=-1).all()
    torch.testing.assert_close(choice.weights_TK, weights_TE.gather(1, choice.chosen_TK))


def test_a_model_in_bf16_keeps_a_bias_that_bf16_would_round(tmp_path: Path) -> None:
    """A bias has grown to 4, and experts differ by less than bf16 distinguishes there: 1/64 is one step of bf16."""
    ENTRIES["glm4_moe"].make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = 4 + torch.arange(8) / 1024
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(narrow | {BIAS: bias}, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    decoder = Decoder(ModelConfig.from_folder(tmp_path), LayerContext(ALONE, torch.bfloat16, CPU))
    load_weights(decoder, checkpoint)
    held = decoder.get_parameter(BIAS)
    assert held.dtype == torch.float32
    assert not held.requires_grad
    assert torch.equal(held.data, bias)
    assert not torch.equal(bias.bfloat16().float(), bias), "bf16 must not hold it"
    router = decoder.get_submodule(NAME)
    assert isinstance(router, Router)
    _, chosen = router.choose(torch.full((1, 8), 0.5))
    assert sorted(chosen[0].tolist()) == [5, 6, 7], "bf16 makes all experts alike"


def test_the_bias_moves_by_the_rate_towards_experts_below_the_mean() -> None:
    mine, _ = routers(torch.float32, 0)
    assert mine.e_score_correction_bias is not None
    before = mine.e_score_correction_bias.detach().clone()
    counts = torch.tensor([7, 1, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2], dtype=torch.float64)  # a mean of 3
    mine.level(counts, 0.001)
    moved = [-1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert torch.equal(mine.e_score_correction_bias, before + 0.001 * torch.tensor(moved).float())
