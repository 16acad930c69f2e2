"""A sequence that is dealt over ranks and collected again: values, lengths that no rank divides, and gradients."""

import pytest
import torch

from tk.parallel.functions import collect_sequence, deal_sequence
from tk.parallel.mesh import ALONE, join_world
from tk.tests.rank_pool import RankPool


def check_dealing(length: int) -> None:
    group = join_world()
    x_BLD = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights_BLD = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(1))
    part = deal_sequence(x_BLD, group)
    size = -(-length // group.size)
    mine = x_BLD[:, group.rank * size : (group.rank + 1) * size]
    assert part.shape == (2, size, 3), "all parts are equally long"
    assert part[:, : mine.shape[1]].equal(mine)
    assert not part[:, mine.shape[1] :].any()
    whole = collect_sequence(part * (group.rank + 1), length, group)
    factors_L1 = torch.arange(length).floor_divide(size).add(1).unsqueeze(1)
    assert whole.equal(x_BLD * factors_L1)
    (whole * weights_BLD).sum().backward()
    assert x_BLD.grad is not None
    assert x_BLD.grad.equal(weights_BLD * factors_L1), "replicated, and no rank counts it again"


@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_a_sequence_is_dealt_and_collected(rank_pool: RankPool, length: int) -> None:
    rank_pool.run(check_dealing, 3, length=length)


def test_a_rank_alone_has_the_whole_sequence() -> None:
    x = torch.randn(5, 3)
    assert deal_sequence(x, ALONE) is x
    assert collect_sequence(x, 5, ALONE) is x
