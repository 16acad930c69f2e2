"""No order of collectives in which ranks could wait for each other for ever, with experts and positions over ranks."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tk.tests.rank_pool import RankPool
from tk.tests.train.collective_order import Event, find_deadlock, record
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training

SHARED_EXPERTS: dict[str, Any] = {
    "architecture": "qwen2_moe",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LAYOUTS: dict[str, tuple[dict[str, Any], int, str]] = {
    # two ep groups in one tp group, with other numbers of rounds
    "tp 4, ep 2, recomputed": ({"tp": 4, "ep": 2}, 0, "selective"),
    "cp 2, tp 2, ep 2": ({"cp": 2, "tp": 2, "ep": 2}, 3, "full"),
    "cp 2 by ulysses, ep 4": ({"cp": 2, "dp": 2, "ep": 4, "cp_mode": "ulysses"}, 2, "none"),
    "pp 2, cp 2, ep 2": ({"pp": 2, "cp": 2, "ep": 2}, 1, "full"),
    "pp 2, tp 2, ep 2": ({"pp": 2, "tp": 2, "ep": 2, "schedule": "zb-h1"}, 1, "none"),
    "ep 2, each expert cut": ({"tp": 2, "dp": 2, "ep": 2, "expert_tp": 2}, 3, "selective"),
    "interleaved, dp 2, ep 2": (
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "interleaved", "num_virtual_stages": 2}, 2, "selective"),
}  # fmt: skip
FEW = ["tp 4, ep 2, recomputed", "pp 2, cp 2, ep 2"]


def recorded(config: dict[str, Any]) -> list[Any]:
    """Trains on this rank of the pool, and returns its events."""
    with pytest.MonkeyPatch.context() as patch:
        events = record(patch)
        run_training(config)
    return events


def orders_of(rank_pool: RankPool, config: dict[str, Any]) -> list[list[Event]]:
    found = rank_pool.run(recorded, 4, config=config)
    return [[Event(kind, tuple(ranks), size) for kind, ranks, size in events] for events in found]


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds: 4 ranks share 2 cores with other tests
@pytest.mark.parametrize(
    "layout", [name if name in FEW else pytest.param(name, marks=pytest.mark.matrix) for name in LAYOUTS]
)
def test_no_order_of_collectives_and_messages_can_deadlock(
    rank_pool: RankPool, configure: Configure, layout: str
) -> None:
    axes, stage, mode = LAYOUTS[layout]
    model = SHARED_EXPERTS | {"num_hidden_layers": 4 if "num_virtual_stages" in axes else 2}
    config = configure("run", model=model, train={"steps": 2}, recompute={"mode": mode})
    config["parallel"], config["zero"] = axes, {"stage": stage}
    orders = orders_of(rank_pool, config)
    assert find_deadlock(orders) == ""
    exchanges = Counter(event.ranks for order in orders for event in order if event.kind == "all_to_all_single")
    assert exchanges, "the experts exchanged nothing"
    assert any(event.kind == "receive" for order in orders for event in order) == ("pp" in axes)
    if layout == FEW[0]:
        rounds = {count for ranks, count in exchanges.items() if len(ranks) == axes["ep"]}
        assert len(rounds) > 1, "the ep groups had equally many rounds, so the row shows nothing"
    assert "waits in" in find_deadlock(with_a_swap(orders))


def with_a_swap(orders: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Swaps two neighbouring collectives of one rank, in both of which another rank takes part, too."""
    changed = [list(order) for order in orders]
    for order in changed:
        for place, (first, second) in enumerate(pairwise(order)):
            if first != second and _share_ranks(first, second):
                order[place : place + 2] = [second, first]
                return changed
    raise AssertionError("no rank has two different collectives in a row")


def _share_ranks(first: Event, second: Event) -> bool:
    messages = {first.kind, second.kind} & {"send", "receive"}
    return not messages and len({*first.ranks} & {*second.ranks}) > 1


A, B = Event("all_reduce", (0, 1), 4), Event("all_to_all_single", (0, 1), -1)


@pytest.mark.parametrize(
    ("orders", "answer"),
    [
        ([[A, B], [A, B]], ""),
        ([[A, B], [B, A]], "rank 0 waits in"),
        ([[A], [A._replace(size=5)]], "rank 0 waits in"),
        ([[A, B], [A]], "rank 0 waits in"),
        ([[Event("send", (0, 1), 2), A], [Event("receive", (0, 1), 2), A]], ""),
        ([[A, Event("send", (0, 1), 2)], [Event("receive", (0, 1), 2), A]], "rank 1 waits in"),
        ([[Event("send", (0, 1), 2)], []], "never received"),
        # a circle of three groups, each pair of which agrees
        ([[Event("a", (0, 1), 1), Event("c", (0, 2), 1)], [Event("b", (1, 2), 1), Event("a", (0, 1), 1)],
          [Event("c", (0, 2), 1), Event("b", (1, 2), 1)]], "rank 2 waits in"),
    ],
)  # fmt: skip
def test_orders_that_deadlock_are_found(orders: list[list[Event]], answer: str) -> None:
    assert (answer in find_deadlock(orders)) if answer else find_deadlock(orders) == ""
