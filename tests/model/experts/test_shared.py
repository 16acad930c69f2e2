"""The shared expert of a mixture against its formula, with and without the gate that weights it."""

import pytest
import torch
import torch.nn.functional as F

from tk.model.experts.mixture import MixtureOfExperts
from tk.model.experts.shared import SharedExpert
from tk.parallel.mesh import ALONE
from tk.tests.model.decoders import build, config_of


def mixture(recompute: str = "none") -> tuple[MixtureOfExperts, SharedExpert]:
    """Returns the first layer's mixture of experts, and the shared expert in it."""
    block = build(config_of("qwen2_moe"), ALONE, recompute=recompute).get_submodule("model.layers.0.mlp")
    assert isinstance(block, MixtureOfExperts)
    assert block.shared_expert is not None
    return block, block.shared_expert


def tokens() -> torch.Tensor:
    return torch.randn(7, 64, generator=torch.Generator().manual_seed(4))


def formula(block: MixtureOfExperts, shared: SharedExpert, x_TD: torch.Tensor) -> torch.Tensor:
    """Returns sigmoid(gate(x)) * down(silu(gate_proj(x)) * up(x)) in fp64."""
    assert block.shared_expert_gate is not None
    x_TD = x_TD.double()
    gate_up, down, gate = (
        part.weight.double() for part in (shared.gate_up_proj, shared.down_proj, block.shared_expert_gate)
    )
    first, up = (x_TD @ gate_up.t()).chunk(2, dim=-1)
    return (x_TD @ gate.t()).sigmoid() * ((F.silu(first) * up) @ down.t())


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_it_adds_its_weighted_output_to_that_of_the_experts(recompute: str) -> None:
    block, shared = mixture(recompute)
    x_TD = tokens()
    expected = formula(block, shared, x_TD)
    with torch.no_grad():
        whole = block(x_TD)
        block.shared_expert = None
        torch.testing.assert_close((whole - block(x_TD)).double(), expected, rtol=1e-4, atol=1e-6)
        assert expected.abs().max() > 1e-3, "the outputs must be large enough to show a difference"
        assert not torch.allclose(shared(x_TD, None).double(), expected, rtol=1e-2, atol=1e-5)


def test_gradients_are_those_of_the_formula() -> None:
    block, shared = mixture()
    x_TD = tokens().requires_grad_()
    shared(x_TD, block.shared_expert_gate).square().sum().backward()
    named = {name: parameter for name, parameter in block.named_parameters() if name.startswith("shared_expert")}
    assert set(named) == {
        "shared_expert.gate_up_proj.weight",
        "shared_expert.down_proj.weight",
        "shared_expert_gate.weight",
    }
    mine = {name: parameter.grad for name, parameter in named.items()} | {"x": x_TD.grad}
    block.zero_grad()
    x_TD.grad = None
    formula(block, shared, x_TD).square().sum().backward()
    for name, tensor in {**named, "x": x_TD}.items():
        gradient, expected = mine[name], tensor.grad
        assert gradient is not None
        assert expected is not None
        assert (gradient - expected).norm() < 1e-5 * expected.norm(), name
