"""The plan of sends and receives, on the strictest backend: every exchange blocks until the other rank joins."""

from dataclasses import dataclass

from hypothesis import given

from tk.tests.example_counts import examples
from tk.tests.train.pipeline.test_schedules import any_schedule
from tk.train.pipeline.actions import Schedule, Transfer
from tk.train.pipeline.communication import Batch, Posts, plan_communication
from tk.train.pipeline.schedules import make_schedule


def _program(schedule: Schedule, rank: int, posts: Posts) -> list[Batch]:
    assert len(posts) == len(schedule.ranks[rank]) + 1
    return [batch for slot in posts for batch in slot]


def blocked(programs: list[list[Batch]]) -> list[Batch]:
    """Returns the batches at which ranks block for ever, if every rank waits for the end of each batch that it posts.

    A transfer ends once both of its ranks have posted it.
    """
    turns = [0] * len(programs)
    while True:
        current = [program[turn] if turn < len(program) else () for program, turn in zip(programs, turns, strict=True)]
        posted = [
            {transfer for batch in program[: turn + 1] for transfer in batch}
            for program, turn in zip(programs, turns, strict=True)
        ]
        free = [
            rank
            for rank, batch in enumerate(current)
            if batch and all(t in posted[t.source] and t in posted[t.destination] for t in batch)
        ]
        if not free:
            return [batch for batch in current if batch]
        for rank in free:
            turns[rank] += 1


@examples(40)
@given(any_schedule())
def test_blocking_exchanges_never_deadlock(schedule: Schedule) -> None:
    plans = plan_communication(schedule)
    assert blocked([_program(schedule, rank, posts) for rank, posts in enumerate(plans)]) == []


@examples(40)
@given(any_schedule())
def test_tensors_are_sent_after_their_computation_and_received_before_their_use(schedule: Schedule) -> None:
    expected = {t for actions in schedule.ranks for action in actions if (t := schedule.transfer_of(action))}
    for rank, posts in enumerate(plan_communication(schedule)):
        turns = {action: turn for turn, action in enumerate(schedule.ranks[rank])}
        seen = [(slot, t) for slot, batches in enumerate(posts) for batch in batches for t in batch]
        assert sorted(map(str, (t for _, t in seen))) == sorted(str(t) for t in expected if rank in _ends(t))
        for slot, transfer in seen:
            if transfer.source == rank:
                assert slot == turns[transfer.producer] + 1, "sends go out at once"
            else:
                assert slot <= turns[transfer.consumer]


@examples(40)
@given(any_schedule())
def test_two_ranks_post_their_transfers_in_the_same_order(schedule: Schedule) -> None:
    programs = [_program(schedule, rank, posts) for rank, posts in enumerate(plan_communication(schedule))]
    flat = [[transfer for batch in program for transfer in batch] for program in programs]
    for a in range(schedule.pp):
        for b in range(schedule.pp):
            assert [t for t in flat[a] if (t.source, t.destination) == (a, b)] == [
                t for t in flat[b] if (t.source, t.destination) == (a, b)
            ]


def _ends(transfer: Transfer) -> tuple[int, int]:
    return transfer.source, transfer.destination


@dataclass(frozen=True)
class _Count:
    ahead: int
    late: int


def _receives(schedule: Schedule) -> _Count:
    ahead = late = 0
    for rank, posts in enumerate(plan_communication(schedule)):
        turns = {action: turn for turn, action in enumerate(schedule.ranks[rank])}
        for slot, batches in enumerate(posts):
            for transfer in (t for batch in batches for t in batch if t.destination == rank):
                if slot < turns[transfer.consumer]:
                    ahead += 1
                else:
                    late += 1
    return _Count(ahead, late)


def test_most_receives_are_posted_ahead() -> None:
    assert _receives(make_schedule("forward-only", 4, 1, 16)).late <= 3, "only the first of every rank"
    gpipe = _receives(make_schedule("gpipe", 4, 1, 16))
    assert gpipe.ahead > 0.8 * (gpipe.ahead + gpipe.late)


def test_the_check_of_this_file_finds_a_deadlock() -> None:
    schedule = make_schedule("1f1b", 2, 1, 2)
    there, back = (schedule.transfer_of(schedule.ranks[rank][turn]) for rank, turn in ((0, 1), (1, 1)))
    assert there is not None
    assert back is not None
    assert blocked([[(there,), (back,)], [(back,), (there,)]]) != []
    assert blocked([[(there, back)], [(back, there)]]) == []
