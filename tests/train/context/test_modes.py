"""The choice between the modes of context parallelism."""

import pytest

from tk.core.errors import ParallelError
from tk.train.context.modes import AttentionExchange, AttentionHeads, choose_mode, exchanges


@pytest.mark.parametrize(
    ("heads", "chosen"),
    [
        (AttentionHeads(32, 8, 2), "gather"),  # 3 x 2 x 8 x 2 = 96 against 2 x (32 + 16 + 32) = 160
        (AttentionHeads(32, 8, 4), "ulysses"),
        (AttentionHeads(32, 32, 2), "ulysses"),
        (AttentionHeads(32, 1, 4), "gather"),
        (AttentionHeads(6, 6, 4), "gather"),  # Ulysses cannot split the heads
    ],
)
def test_auto_moves_fewer_bytes(heads: AttentionHeads, chosen: str) -> None:
    assert choose_mode("auto", heads, "none") == chosen


def test_auto_counts_only_the_keys_that_are_fetched() -> None:
    """At 32 and 8 heads, cp 4 and all keys, gather moves 3 x 64 vectors and Ulysses 2 x (32 + 2 x 8) + 2 x 32 = 160."""
    heads = AttentionHeads(32, 8, 4)
    assert [choose_mode("auto", heads, "none", share) for share in (1.0, 0.84, 0.83, 0.0)] == [
        "ulysses",
        "ulysses",
        "gather",
        "gather",
    ]


def test_a_mode_that_is_asked_for_is_taken() -> None:
    assert choose_mode("gather", AttentionHeads(32, 32, 8), "none") == "gather"
    assert choose_mode("ulysses", AttentionHeads(32, 8, 2), "none") == "ulysses"


def test_a_tp_rank_has_at_least_one_kv_head() -> None:
    assert AttentionHeads.of_rank(32, 8, 4, 2) == AttentionHeads(8, 2, 2)
    assert AttentionHeads.of_rank(32, 2, 8, 2) == AttentionHeads(4, 1, 2)


def test_heads_that_ulysses_cannot_split_are_refused() -> None:
    with pytest.raises(ParallelError, match=r'heads % cp = 6 % 4 = 2 .*Use cp_mode = "gather"'):
        choose_mode("ulysses", AttentionHeads(6, 2, 4), "none")


def test_repeated_kv_heads_are_sent_as_often_as_they_are_repeated() -> None:
    inputs, outputs = exchanges("ulysses", AttentionHeads(8, 2, 4), "none")
    assert (inputs.calls, inputs.vectors) == (2, 8 + 2 * 4)
    assert (outputs.calls, outputs.vectors) == (2, 8)


def test_recomputation_fetches_keys_again() -> None:
    returned = AttentionExchange("gradients of keys and values", 1, 16)
    assert exchanges("gather", AttentionHeads(8, 2, 4), "none") == (
        AttentionExchange("keys and values", 2, 16),
        returned,
    )
    assert exchanges("gather", AttentionHeads(8, 2, 4), "full") == (
        AttentionExchange("keys and values", 3, 16),
        returned,
    )
