"""A rank's part of a micro-batch, whole or dealt."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tk.core.labels import IGNORED
from tk.data.batches import MicroBatch
from tk.parallel.mesh import Group
from tk.train.context.gather import GatheredAttention
from tk.train.context.ulysses import UlyssesAttention
from tk.train.engine.attention import causal_attention
from tk.train.engine.blocked_attention import blocked_or
from tk.train.engine.rows import WHOLE_ROWS, DealtRows


@dataclass
class OneLayer:
    """An attention layer without a window."""

    layer: int = 0
    window: int | None = None


def micro_batch(documents: tuple[int, ...] = ()) -> MicroBatch:
    """Returns two rows of 7 tokens: the second one has no target."""
    inputs = np.arange(1, 15).reshape(2, 7)  # padding is 0
    targets = inputs + 1
    targets[0, :3] = targets[1] = IGNORED
    return MicroBatch(inputs, targets, documents)


def test_whole_rows_are_the_micro_batch() -> None:
    micro = micro_batch()
    part = WHOLE_ROWS.part(micro)
    assert part.inputs is micro.inputs
    assert part.targets is micro.targets
    assert np.array_equal(part.positions, micro.positions)
    assert part.attend == blocked_or(causal_attention)
    assert part.places is None
    assert np.array_equal(part.counted, np.repeat([[True], [False]], 7, axis=1))
    x = torch.randn(2, 7, 2, 4)
    assert WHOLE_ROWS.part(micro_batch((3, 4, 7))).attend(OneLayer(), x, x, x).shape == x.shape


@pytest.mark.parametrize("documents", [(), (3, 4, 7)])
def test_dealt_rows_have_every_input_once_with_its_target_and_places(documents: tuple[int, ...]) -> None:
    micro = micro_batch(documents)
    found, padded = [], 0
    for rank in range(4):
        part = DealtRows(Group(rank=rank, size=4), "gather", [None], 1).part(micro)
        assert part.inputs.shape == (2, 2)
        assert part.places is not None
        for row, column in np.ndindex(2, 2):
            place = int(part.places[row, column])
            values = tuple(int(each[row, column]) for each in (part.inputs, part.targets, part.positions))
            if values == (micro.inputs[row, place], micro.targets[row, place], micro.positions[row, place]):
                found.append((row, place))
                assert part.counted[row, column] == (row == 0), "also without a target, in a row that has some"
            else:
                assert values == (0, IGNORED, 0)
                assert not part.counted[row, column]
                padded += 1
    assert padded == 2
    assert sorted(found) == list(np.ndindex(2, 7))


def test_the_mode_and_the_multiple_are_those_of_the_run() -> None:
    gather = DealtRows(Group(rank=0, size=2), "gather", [None], 3)
    assert isinstance(gather.part(micro_batch()).attend, GatheredAttention)
    part = DealtRows(Group(rank=0, size=2), "ulysses", [None], 3).part(micro_batch())
    assert isinstance(part.attend, UlyssesAttention)
    assert part.inputs.shape == (2, 6), "ceil(7 / 2), rounded up to a multiple of 3"


def test_rows_that_are_cut_alike_share_their_attention() -> None:
    rows = DealtRows(Group(rank=0, size=2), "gather", [None], 1)
    first = rows.part(micro_batch()).attend
    assert rows.part(micro_batch()).attend is first
    assert rows.part(micro_batch((3, 4, 7))).attend is not first
