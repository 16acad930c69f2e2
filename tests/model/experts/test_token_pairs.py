"""Pairs of tokens and experts against one expert after another in fp64, in orders of any kind."""

import pytest
import torch

from tk.model.experts.token_pairs import TokenPairs
from tk.parallel.row_groups import RowGroups

TOKENS, EXPERTS, TOP_K, WIDTH = 50, 6, 3, 4


def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens [T, D], the experts of each, ascending [T, K], and their weights."""
    generator = torch.Generator().manual_seed(0)
    chosen_TK = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].sort(dim=1).values
    return torch.randn(TOKENS, WIDTH, generator=generator), chosen_TK, torch.rand(TOKENS, TOP_K, generator=generator)


@pytest.mark.parametrize("arranged", [False, True])
def test_sums_and_gradients_are_those_of_one_expert_after_another(arranged: bool) -> None:
    x_TD, chosen_TK, weights_TK = draw()
    pairs, _ = TokenPairs.by_expert(chosen_TK, EXPERTS)
    experts_P = chosen_TK.flatten().sort(stable=True).values
    if arranged:
        order_P = torch.randperm(len(experts_P), generator=torch.Generator().manual_seed(1))
        pairs, experts_P = pairs.arranged(order_P), experts_P[order_P]
    mine = [value.clone().requires_grad_() for value in (x_TD, weights_TK)]
    y_TD = pairs.weighted_sum(pairs.spread(mine[0]) * (experts_P + 1).unsqueeze(1), mine[1])
    y_TD.square().sum().backward()
    wide = [value.double().requires_grad_() for value in (x_TD, weights_TK)]
    expected_TD = (wide[0].unsqueeze(1) * ((chosen_TK + 1) * wide[1]).unsqueeze(-1)).sum(dim=1)
    expected_TD.square().sum().backward()
    torch.testing.assert_close(y_TD.double(), expected_TD, rtol=1e-5, atol=1e-5)
    for value, exact in zip(mine, wide, strict=True):
        assert value.grad is not None
        torch.testing.assert_close(value.grad.double(), exact.grad, rtol=1e-5, atol=1e-4)


def test_the_order_of_pairs_changes_no_bits() -> None:
    """Ranks send their pairs in other orders; the sum of a token's outputs, and of its gradients, must not change."""
    x_TD, chosen_TK, weights_TK = draw()
    plain, _ = TokenPairs.by_expert(chosen_TK, EXPERTS)
    order_P = torch.randperm(TOKENS * TOP_K, generator=torch.Generator().manual_seed(1))
    outputs_PD = torch.randn(TOKENS * TOP_K, WIDTH, generator=torch.Generator().manual_seed(2))
    found = []
    for pairs, y_PD in ((plain, outputs_PD), (plain.arranged(order_P), outputs_PD[order_P])):
        x = x_TD.clone().requires_grad_()
        (pairs.spread(x) * y_PD).sum().backward()
        found.append((pairs.weighted_sum(y_PD, weights_TK), x.grad))
    for value, other in zip(*found, strict=True):
        assert value is not None
        assert other is not None
        assert value.equal(other)


def test_pairs_are_sorted_by_expert_and_token() -> None:
    _, chosen_TK, _ = draw()
    pairs, ends_E = TokenPairs.by_expert(chosen_TK, EXPERTS + 2)
    experts_P = chosen_TK.flatten().sort(stable=True).values
    assert RowGroups(ends_E).counts == tuple(experts_P.bincount(minlength=EXPERTS + 2).tolist())
    assert (chosen_TK[pairs.tokens_P] == experts_P.unsqueeze(1)).any(dim=1).all()
    keys_P = experts_P * TOKENS + pairs.tokens_P
    assert keys_P.equal(keys_P.sort().values)


def test_bf16_is_summed_in_fp32_and_rounded_once() -> None:
    pairs, _ = TokenPairs.by_expert(torch.tensor([[0, 1, 2]]), 3)
    y_PD = torch.tensor([[256.0], [0.6], [0.6]]).bfloat16()
    assert pairs.weighted_sum(y_PD, torch.ones(1, 3)).item() == 258.0, "256 + 0.6 alone would be 256"
    x_TD = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    pairs.spread(x_TD).backward(y_PD)
    assert x_TD.grad is not None
    assert x_TD.grad.item() == 258.0
