"""A served mixture of experts against a loop over tokens and experts, and the bits of a token among others."""

import pytest
import torch
import torch.nn.functional as F

from tk.infer.engine.kernels.aten.expert_products import ExpertWeights
from tk.infer.engine.kernels.aten.experts import Routing, choose_experts, run_experts
from tk.infer.engine.program.operations import Route, RunExperts, WeightMatrix

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 32, 6, 2
ROUTE = Route(WeightMatrix("router", HIDDEN, NUM_EXPERTS), TOP_K, normalize=True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(x_TD: torch.Tensor, routing: Routing, num_slices: int = 1) -> torch.Tensor:
    operation = RunExperts("gate_up", "down", NUM_EXPERTS, INNER, num_slices)
    gate_up, down = random(NUM_EXPERTS * 2 * INNER, HIDDEN, seed=1), random(NUM_EXPERTS * HIDDEN, INNER, seed=2)
    return run_experts(x_TD, routing, ExpertWeights(gate_up, down, operation))


def one_by_one(x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns the output [T, D] of every token's experts, in fp64."""
    gate_ups = random(NUM_EXPERTS * 2 * INNER, HIDDEN, seed=1).double().chunk(NUM_EXPERTS)
    downs = random(NUM_EXPERTS * HIDDEN, INNER, seed=2).double().chunk(NUM_EXPERTS)
    outputs = []
    for x_D, weights, chosen in zip(x_TD.double(), routing.weights_TK, routing.chosen_TK, strict=True):
        y_D = torch.zeros_like(x_D)
        for weight, expert in zip(weights.tolist(), chosen.tolist(), strict=True):
            gate, up = (gate_ups[expert] @ x_D).chunk(2)
            y_D = y_D + weight * (downs[expert] @ (F.silu(gate) * up))
        outputs.append(y_D)
    return torch.stack(outputs)


@pytest.mark.parametrize("num_slices", [1, 4])
def test_every_token_passes_its_experts(num_slices: int) -> None:
    x_TD, routing = random(40, HIDDEN), choose_experts(random(40, NUM_EXPERTS, seed=3), ROUTE)
    torch.testing.assert_close(run(x_TD, routing, num_slices).double(), one_by_one(x_TD, routing), rtol=1e-4, atol=1e-3)


def test_the_best_experts_are_chosen_and_the_lowest_of_equals_first() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, 0.0], [5.0, 0.0, 0.0, 0.0, 0.0, 6.0]])
    routing = choose_experts(scores, ROUTE)
    assert routing.chosen_TK.tolist() == [[1, 2], [5, 0]]
    torch.testing.assert_close(routing.weights_TK, torch.tensor([[0.5, 0.5], [0.7310586, 0.2689414]]))
    plain = choose_experts(scores, Route(ROUTE.matrix, TOP_K, normalize=False))
    torch.testing.assert_close(plain.weights_TK, scores.softmax(-1).gather(-1, routing.chosen_TK))


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    x_TD, scores_TE = random(48, HIDDEN), random(48, NUM_EXPERTS, seed=3)
    mixed = [tensor.flip(0).roll(7, dims=0) for tensor in (x_TD, scores_TE)]  # other numbers of tokens per expert
    for new, old in zip(mixed, (x_TD, scores_TE), strict=True):
        new[5] = old[5]
    with torch.inference_mode():
        found, others = run(x_TD, choose_experts(scores_TE, ROUTE)), run(mixed[0], choose_experts(mixed[1], ROUTE))
        alone = run(x_TD[5:6], choose_experts(scores_TE[5:6], ROUTE))
    assert others[5].equal(found[5])
    assert alone[0].equal(found[5])
    assert not others[6].equal(found[6])
