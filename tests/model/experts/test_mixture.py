"""A mixture of experts against a loop over tokens and experts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tk.model.activation import swiglu
from tk.model.experts.mixture import MixtureOfExperts
from tk.parallel.mesh import ALONE
from tk.parallel.products import linear
from tk.tests.model.decoders import build, config_of


def mixture(name: str, **options: Any) -> MixtureOfExperts:
    """Returns the mixture of experts of the first layer of an entry's decoder."""
    block = build(config_of(name), ALONE, **options).get_submodule("model.layers.0.mlp")
    assert isinstance(block, MixtureOfExperts)
    return block


def tokens(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(2))


def one_by_one(block: MixtureOfExperts, x_TD: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Returns the output [T, D] of every token's experts, in fp64."""
    outputs = []
    experts = [(gate_up.double(), down.double()) for gate_up, down in zip(*block.experts.weights(), strict=True)]
    for x_D in x_TD.double():
        scores = (block.gate.weight.double() @ x_D).exp()
        probabilities = scores / scores.sum()
        chosen = sorted(range(len(experts)), key=lambda expert: -probabilities[expert].item())[: block.gate.top_k]
        total = sum(probabilities[expert] for expert in chosen) if normalize else 1.0
        y_D = torch.zeros_like(x_D)
        for expert in chosen:
            gate_up, down = experts[expert]
            gate, up = (gate_up @ x_D).chunk(2)
            y_D = y_D + probabilities[expert] / total * (down @ (F.silu(gate) * up))
        outputs.append(y_D)
    return torch.stack(outputs)


@pytest.mark.parametrize("options", [{}, {"recompute": "selective"}])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_every_token_passes_its_experts(name: str, options: dict[str, Any]) -> None:
    block, x = mixture(name, **options), tokens(20)
    with torch.no_grad():
        expected = one_by_one(block, x, normalize=True)
        torch.testing.assert_close(block(x.view(4, 5, 64)).view(20, 64).double(), expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().max() > 1e-3, "the outputs must be large enough to show a difference"


def test_probabilities_are_scaled_to_1_only_if_the_architecture_scales_them() -> None:
    block, x = mixture("qwen3_moe"), tokens(20)
    block.gate.normalize = False
    with torch.no_grad():
        plain = one_by_one(block, x, normalize=False)
        torch.testing.assert_close(block(x).double(), plain, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(plain, one_by_one(block, x, normalize=True), rtol=1e-2, atol=1e-5)


def test_gradients_reach_router_and_experts_as_in_the_loop() -> None:
    block, x = mixture("mixtral"), tokens(12)
    block(x).square().sum().backward()
    mine = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad()
    one_by_one(block, x, normalize=True).square().sum().backward()
    assert set(mine) == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    for name, parameter in block.named_parameters():
        gradient, expected = mine[name], parameter.grad
        assert gradient is not None
        assert expected is not None
        assert (gradient - expected).norm() < 1e-5 * expected.norm(), name


def test_sums_have_the_bits_of_one_expert_after_another() -> None:
    block, x_TD = mixture("mixtral").to(torch.bfloat16), tokens(40).bfloat16()
    choice = block.gate(x_TD)
    sums_TD = torch.zeros(x_TD.shape)
    for expert, (gate_up, down) in enumerate(zip(*block.experts.weights(), strict=True)):
        sent, k = (choice.chosen_TK == expert).nonzero(as_tuple=True)
        y_PD = linear(swiglu(linear(x_TD[sent], gate_up)), down)
        sums_TD.index_add_(0, sent, y_PD.float() * choice.weights_TK[sent, k].unsqueeze(-1))
    assert torch.equal(block(x_TD), sums_TD.to(x_TD.dtype))
