"""A batch is cut with targets of the whole row; what cannot be cut is refused by name."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tk.core.errors import ConfigError
from tk.parallel.mesh import join_world
from tk.tests.rank_pool import RankPool
from tk.train.foreign.context_batch import WholeBatch, check_same

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def test_targets_are_the_next_labels_of_the_row() -> None:
    labels = IDS.clone()
    labels[0, 2] = -100
    batch = WholeBatch.of({"input_ids": IDS, "labels": labels})
    np.testing.assert_array_equal(batch.targets, [[2, -100, 4, -100], [6, 7, 8, -100]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3]] * 2)
    assert (batch.num_valid, batch.documents) == (5, ())


def test_position_ids_that_begin_again_are_documents_unless_there_is_a_mask() -> None:
    given = {"input_ids": IDS, "labels": IDS, "position_ids": torch.tensor([[0, 1, 0, 1], [4, 5, 6, 7]])}
    assert WholeBatch.of(given).documents == (2, 2, 4)
    np.testing.assert_array_equal(WholeBatch.of(given).positions, given["position_ids"].numpy())
    assert WholeBatch.of(given | {"attention_mask": torch.ones_like(IDS)}).documents == ()
    assert WholeBatch.of(given | {"position_ids": torch.tensor([[0, 1, 2, 0]])}).documents == (3, 1, 3, 1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"labels": None}, "no labels"),
        ({"labels": IDS[:1]}, r"labels have shape \[1, 4\]"),
        ({"input_ids": IDS[0]}, r"input_ids is \[4\]"),
        ({"input_ids": IDS.float()}, "float32"),
        ({"inputs_embeds": torch.ones(2, 4, 8)}, "inputs_embeds cannot be dealt"),
        ({"past_key_values": object()}, "past_key_values cannot be dealt"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"attention_mask is \[2, 1, 4, 4\]"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}, "row 0. Pad rows at their ends"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}, "row 1 has labels"),
        ({"attention_mask": torch.full((2, 4), 2)}, "zeros and ones"),
        ({"position_ids": IDS[:, :2]}, "position_ids have shape"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        WholeBatch.of({"input_ids": IDS, "labels": IDS} | changes)
    with pytest.raises(ConfigError, match="mapping"):
        WholeBatch.of((IDS, IDS))


def compare() -> None:
    """Compares batches that are the same, then others on rank 1."""
    group = join_world()
    check_same({"input_ids": IDS, "labels": IDS}, group)
    check_same({"labels": IDS, "input_ids": IDS, "attention_mask": None}, group)
    with pytest.raises(ConfigError, match="rank 1 of them has another one"):
        check_same({"input_ids": IDS + dist.get_rank(), "labels": IDS}, group)


def test_ranks_that_share_rows_need_the_same_batch(rank_pool: RankPool) -> None:
    rank_pool.run(compare, 2)
