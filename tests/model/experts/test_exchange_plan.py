"""The plan of an exchange of tokens, carried out on lists: every pair is computed once, in one order, in few rounds."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.model.experts.exchange_plan import HEADROOM, Counts, ExchangePlan, plan_exchange

Pair = tuple[int, int, int]  # expert, rank that sends, token


@st.composite
def counts_of_ranks(draw: st.DrawFn) -> Counts:
    ranks = draw(st.integers(1, 5))
    experts = ranks * draw(st.integers(1, 4))
    size = ranks * experts
    flat = draw(st.lists(st.integers(0, 7) | st.just(0) | st.integers(0, 60), min_size=size, max_size=size))
    return np.array(flat, dtype=np.int64).reshape(ranks, experts)


def pairs_of(counts: Counts, rank: int) -> list[Pair]:
    """Returns a rank's pairs sorted by expert and token; tokens of one rank have different numbers."""
    experts = np.repeat(np.arange(counts.shape[1]), counts[rank])
    return [(int(expert), rank, token) for token, expert in enumerate(experts)]


def carry_out(counts: Counts) -> tuple[list[list[list[Pair]]], list[ExchangePlan]]:
    """Returns the pairs that each rank computes in each round, in the order of their computation, and the plans."""
    ranks = range(len(counts))
    plans = [plan_exchange(counts, rank) for rank in ranks]
    computed: list[list[list[Pair]]] = [[] for _ in ranks]
    queues = [[pairs_of(counts, rank)[place] for place in plans[rank].order_P] for rank in ranks]
    for number in range(len(plans[0].rounds)):
        messages = {}
        for rank in ranks:
            for target, size in enumerate(plans[rank].rounds[number].sent):
                messages[rank, target] = [queues[rank].pop(0) for _ in range(size)]
        for rank in ranks:
            current = plans[rank].rounds[number]
            assert tuple(len(messages[sender, rank]) for sender in ranks) == current.received
            arrived = [pair for sender in ranks for pair in messages[sender, rank]]
            computed[rank].append([arrived[place] for place in current.order])
            of_experts = np.bincount([pair[0] for pair in computed[rank][-1]], minlength=counts.shape[1])
            own = counts.shape[1] // len(counts)
            assert tuple(of_experts[rank * own : (rank + 1) * own]) == current.counts
    assert not any(queues)
    return computed, plans


@given(counts_of_ranks())
def test_each_rank_computes_its_experts_pairs_once_and_in_order(counts: Counts) -> None:
    computed, plans = carry_out(counts)
    own = counts.shape[1] // len(counts)
    everything = [pair for rank in range(len(counts)) for pair in pairs_of(counts, rank)]
    for rank, rounds in enumerate(computed):
        mine = sorted(pair for pair in everything if pair[0] // own == rank)
        assert [pair for each in rounds for pair in each] == mine
    assert len({len(plan.rounds) for plan in plans}) == 1, "all ranks run the same collectives"


@given(counts_of_ranks())
def test_rounds_are_as_few_as_their_bound_allows(counts: Counts) -> None:
    computed, _ = carry_out(counts)
    most = max(1, ceil(HEADROOM * counts.sum() / len(counts)))
    loads = [sum(map(len, rounds)) for rounds in computed]
    assert all(len(pairs) <= most for rounds in computed for pairs in rounds)
    assert {len(rounds) for rounds in computed} == {max(1, ceil(max(loads) / most))}


@pytest.mark.parametrize(("hot", "num_rounds"), [(0.25, 1), (0.3, 1), (0.5, 2), (1.0, 4)])
def test_a_hot_rank_needs_more_rounds(hot: float, num_rounds: int) -> None:
    tokens = 6000
    on_hot = int(hot * tokens)
    counts = np.full((4, 4), (tokens - on_hot) // 3)
    counts[:, 2] = on_hot
    assert len(plan_exchange(counts, 1).rounds) == num_rounds
