"""Context-parallel attention of processes, in both modes, against plain attention over whole rows."""

from typing import Any

import pytest
import torch

from tk.parallel import collectives
from tk.parallel.mesh import Group, join_world
from tk.tests.rank_pool import RankPool
from tk.tests.train.context.over_ranks import Layer, compare_modes
from tk.tests.train.context.plain_attention import random_qkv
from tk.train.context.dealing import Dealing, deal
from tk.train.context.fetching import fetching
from tk.train.context.gather import GatheredAttention, KeyExchange


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_both_modes_are_plain_attention(rank_pool: RankPool, cp: int) -> None:
    rank_pool.run(compare_modes, cp, dtype="float32", bound=4e-7)


@pytest.mark.parametrize(
    "cp", [2, pytest.param(3, marks=pytest.mark.matrix), pytest.param(4, marks=pytest.mark.matrix)]
)
def test_both_modes_in_bf16(rank_pool: RankPool, cp: int) -> None:
    rank_pool.run(compare_modes, cp, dtype="bfloat16", bound=1e-2)


def kept_and_sent(documents: list[int], window: int | None) -> dict[str, Any]:
    """Runs a layer forward and backward; returns the elements of tensors kept for backward, and the rows sent."""
    group = join_world()
    dealing = deal(1, 256, documents, [window], group.size)
    mine = torch.from_numpy(dealing.positions(group.rank))
    q, k, v, grad = (each[mine] for each in random_qkv(256, (8, 4)))
    kept: dict[int, int] = {}
    sent: list[int] = []
    start = collectives.start_all_to_all

    def counted(rows: torch.Tensor, *args: Any) -> collectives.PendingResult:
        sent.append(len(rows))
        return start(rows, *args)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    attend = GatheredAttention(dealing, group)
    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        patch.setattr("tk.train.context.gather.start_all_to_all", counted)
        out = attend(Layer(window), q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        forward = len(sent)
        out.backward(grad)
    return {"kept": sum(kept.values()), "forward": sent[:forward], "backward": sent[forward:]}


def test_keys_of_other_ranks_are_not_kept_but_fetched_again(rank_pool: RankPool) -> None:
    found = rank_pool.run(kept_and_sent, 4, documents=[], window=None)
    own = 64 * 16 * (8 + 4 + 4 + 8) + 64 * 8  # q, k, v, output and log-sum-exp of 64 positions
    assert [each["kept"] for each in found] == [own] * 4
    for rank, each in enumerate(found):
        plan = fetching(deal(1, 256, (), [None], 4), rank, None)
        rows = [sum(map(len, plan.sent))] * 4  # four groups of one kv head
        fetched = [len(plan.order)] * 4
        assert each["forward"] == rows
        assert sorted(each["backward"]) == sorted(rows + fetched)


def test_short_documents_of_a_rank_move_no_keys(rank_pool: RankPool) -> None:
    for each in rank_pool.run(kept_and_sent, 4, documents=[32] * 8, window=None):
        assert each["forward"] == [64], "this rank's own keys, of all heads at once"


def test_no_group_of_heads_takes_more_memory_than_own_keys() -> None:
    def exchange(dealing: Dealing, window: int | None) -> KeyExchange:
        return KeyExchange(fetching(dealing, 1, window), Group(), torch.device("cpu"))

    long, packed = deal(1, 512, (), [None], 4), deal(1, 512, (64,) * 8, [None], 4)
    assert exchange(long, None).head_groups(torch.empty(128, 8, 16)) == [range(n, n + 2) for n in range(0, 8, 2)]
    assert exchange(long, None).head_groups(torch.empty(128, 5, 16)) == [range(n, n + 1) for n in range(5)]
    assert exchange(long, None).head_groups(torch.empty(128, 1, 16)) == [range(1)]
    assert exchange(packed, None).head_groups(torch.empty(128, 8, 16)) == [range(8)]
