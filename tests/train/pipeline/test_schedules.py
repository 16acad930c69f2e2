"""Schedules: every micro-batch goes once through every stage, and orders equal those of PyTorch's schedules."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

from tk.core.errors import ParallelError
from tk.tests.example_counts import examples
from tk.train.pipeline.actions import Action, Kind, Schedule
from tk.train.pipeline.schedules import NAMES, make_schedule


@st.composite
def any_schedule(draw: st.DrawFn, names: tuple[str, ...] = (*NAMES, "forward-only")) -> Schedule:
    """Draws any valid combination of up to 8 ranks, 4 virtual stages and 24 micro-batches."""
    name = draw(st.sampled_from(names))
    pp = draw(st.integers(2 if name == "interleaved" else 1, 8))
    low, high = {"interleaved": (2, 4), "1f1b": (1, 1), "zb-h1": (1, 1)}.get(name, (1, 4 if pp > 1 else 1))
    return make_schedule(name, pp, draw(st.integers(low, high)), draw(st.integers(1, 24)))


@examples(80)
@given(any_schedule())
def test_every_micro_batch_goes_once_through_every_stage_in_order(schedule: Schedule) -> None:
    if schedule.forward_only:
        expected = [Kind.FORWARD]
    elif schedule.splits_backward:
        expected = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]
    else:
        expected = [Kind.FORWARD, Kind.BACKWARD]
    for rank, actions in enumerate(schedule.ranks):
        kinds: dict[tuple[int, int], list[Kind]] = {}
        for action in actions:
            assert schedule.rank_of(action.stage) == rank
            kinds.setdefault((action.stage, action.micro_batch), []).append(action.kind)
        assert set(kinds) == {
            (stage, index)
            for stage in range(rank, schedule.num_stages, schedule.pp)
            for index in range(schedule.num_micro_batches)
        }
        assert all(each == expected for each in kinds.values())


@examples(60)
@given(any_schedule())
def test_every_stage_takes_micro_batches_in_order(schedule: Schedule) -> None:
    """Gradients are then summed in the order of one process."""
    for actions in schedule.ranks:
        turns: dict[tuple[Kind, int], list[int]] = {}
        for action in actions:
            turns.setdefault((action.kind, action.stage), []).append(action.micro_batch)
        assert all(each == sorted(each) for each in turns.values())


def _executed(schedule_class: Any, rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    """Returns the actions of a PyTorch schedule on a rank, recorded by a mock stage in PyTorch's own loop."""
    done: list[Action] = []
    step = MagicMock(_n_microbatches=num_micro_batches, _num_stages=pp)
    step._check_inputs.return_value = ([()] * num_micro_batches, [{}] * num_micro_batches)
    stage = step._stage
    stage.stage_index = rank
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: done.append(Action(Kind.FORWARD, rank, index))
    stage.backward_one_chunk.side_effect = lambda index, *_, **__: done.append(Action(Kind.BACKWARD, rank, index))
    for operations in (stage.get_fwd_recv_ops, stage.get_fwd_send_ops, stage.get_bwd_recv_ops, stage.get_bwd_send_ops):
        operations.return_value = []
    schedule_class._step_microbatches(step)
    return done


def _planned(schedule_class: Any, rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> list[Action]:
    """Returns the actions that a PyTorch schedule with several stages per rank plans for a rank."""
    groups = max(1, num_micro_batches // pp)
    plan = SimpleNamespace(
        rank=rank,
        pp_group_size=pp,
        n_local_stages=virtual_stages,
        _n_microbatches=num_micro_batches,
        number_of_rounds=groups,
        microbatches_per_round=num_micro_batches // groups,
    )
    actions = schedule_class._calculate_single_rank_operations(plan, rank)
    return [
        Action(Kind(action.computation_type.value), action.stage_index, action.microbatch_index)
        for action in actions
        if action is not None
    ]


@pytest.mark.parametrize("pp", [2, 4])
def test_one_stage_per_rank_has_the_order_of_torch(pp: int) -> None:
    for name, schedule_class, low in (("gpipe", torchs.ScheduleGPipe, 1), ("1f1b", torchs.Schedule1F1B, pp)):
        for count in range(low, 12):
            ours = make_schedule(name, pp, 1, count)
            for rank in range(pp):
                assert list(ours.ranks[rank]) == _executed(schedule_class, rank, pp, count), (name, count, rank)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(
    ("name", "schedule_class", "virtual_stages"),
    [
        ("interleaved", torchs.ScheduleInterleaved1F1B, 2),
        ("interleaved", torchs.ScheduleInterleaved1F1B, 3),
        ("zb-h1", torchs.ScheduleInterleavedZeroBubble, 1),
    ],
)
def test_planned_orders_are_those_of_torch(name: str, schedule_class: Any, virtual_stages: int, pp: int) -> None:
    for count in (1, 2, 3, 4, 6, 8, 10, 12):  # each is a multiple of its number of groups, as PyTorch demands
        ours = make_schedule(name, pp, virtual_stages, count)
        for rank in range(pp):
            assert list(ours.ranks[rank]) == _planned(schedule_class, rank, pp, virtual_stages, count), (count, rank)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 1, 4), "'2f2b' does not exist. Use one of gpipe, 1f1b, interleaved, zb-h1"),
        (("1f1b", 2, 1, 0), "num_micro_batches = 0; it must be 1 or more"),
        (("gpipe", 1, 2, 4), "virtual_stages = 2 with pp = 1: .* Use virtual_stages = 1 or a larger pp"),
        (("zb-h1", 2, 2, 4), "virtual_stages = 2. Use virtual_stages = 1, or schedule = 'interleaved'"),
        (("interleaved", 4, 1, 4), "virtual_stages >= 2, but virtual_stages = 1. Use schedule = '1f1b'"),
    ],
)
def test_an_unknown_schedule_is_refused_with_the_names_that_exist(
    arguments: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(ParallelError, match=message):
        make_schedule(*arguments)
