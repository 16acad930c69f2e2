"""Tiles of experts as a GPU computes them: the outputs of each expert's own products, however tokens are dealt."""

import pytest
import torch

from tk.infer.engine.kernels.aten import expert_products
from tk.infer.engine.kernels.aten.expert_products import ExpertWeights, by_tiles, of_expert
from tk.infer.engine.program.operations import RunExperts

HIDDEN, INNER = 32, 16


@pytest.mark.parametrize("num_slices", [1, 4])
@pytest.mark.parametrize(
    "counts", [[0, 0, 1], [5, 0, 0], [1, 1, 1, 1], [16, 17, 0, 15, 1], [0, 64, 0], [3] * 9 + [40], [33, 1, 1, 1, 1]]
)
def test_pairs_get_the_bits_of_their_experts_own_products(
    counts: list[int], num_slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    gate_up = torch.randn(len(counts) * 2 * INNER, HIDDEN, generator=draw)
    down = torch.randn(len(counts) * HIDDEN, INNER, generator=draw)
    weights = ExpertWeights(gate_up, down, RunExperts("gate_up", "down", len(counts), INNER, num_slices))
    x_PD, ends_E = torch.randn(sum(counts), HIDDEN, generator=draw), torch.tensor(counts).cumsum(0).int()
    expected = torch.cat([of_expert(x, i, weights, ()) for i, x in enumerate(x_PD.split(counts)) if len(x)])
    for most in (1, 2 * 3 * INNER * HIDDEN, 2**24):  # one tile at a time, two, all
        monkeypatch.setattr(expert_products, "_MOST_VALUES", most)
        assert by_tiles(x_PD, ends_E, weights, None).equal(expected)
