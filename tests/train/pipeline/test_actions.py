"""Actions of a pipeline: their names, what they need, and the tensors that go to another rank."""

import pytest

from tk.train.pipeline.actions import Action, Kind, Schedule, Transfer

F, B, INPUT, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
TWO_BY_TWO = Schedule("any", 2, 2, 1, ((), ()))  # stages 0 and 2 on rank 0, stages 1 and 3 on rank 1
ALONE = Schedule("any", 1, 2, 1, ((),))


@pytest.mark.parametrize(
    ("action", "consumer", "source", "destination", "name"),
    [
        (Action(F, 0, 5), Action(F, 1, 5), 0, 1, "the activation of micro-batch 5 from stage 0"),
        (Action(F, 1, 5), Action(F, 2, 5), 1, 0, "the activation of micro-batch 5 from stage 1"),
        (Action(B, 3, 2), Action(B, 2, 2), 1, 0, "the gradient of micro-batch 2 from stage 3"),
        (Action(INPUT, 2, 0), Action(INPUT, 1, 0), 0, 1, "the gradient of micro-batch 0 from stage 2"),
    ],
)
def test_a_result_goes_to_the_rank_of_the_next_stage(
    action: Action, consumer: Action, source: int, destination: int, name: str
) -> None:
    transfer = TWO_BY_TWO.transfer_of(action)
    assert transfer == Transfer(action, consumer, source, destination)
    assert str(transfer) == name
    assert list(TWO_BY_TWO.dependencies(consumer))[-1] == action


@pytest.mark.parametrize("action", [Action(F, 3, 0), Action(B, 0, 0), Action(INPUT, 0, 0), Action(W, 2, 0)])
def test_losses_first_gradients_and_weight_gradients_go_nowhere(action: Action) -> None:
    assert TWO_BY_TWO.transfer_of(action) is None


def test_stages_of_one_rank_send_nothing_to_each_other() -> None:
    assert ALONE.transfer_of(Action(F, 0, 0)) is None
    assert list(ALONE.dependencies(Action(F, 1, 0))) == [Action(F, 0, 0)], "but one needs the other's result"


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        (Action(F, 0, 1), []),
        (Action(F, 2, 1), [Action(F, 1, 1)]),
        (Action(B, 3, 1), [Action(F, 3, 1)]),
        (Action(B, 1, 1), [Action(F, 1, 1), Action(B, 2, 1)]),
        (Action(INPUT, 1, 1), [Action(F, 1, 1), Action(INPUT, 2, 1)]),
        (Action(W, 1, 1), [Action(INPUT, 1, 1)]),
    ],
)
def test_an_action_needs_its_own_forward_and_the_next_stage_of_its_pass(action: Action, needed: list[Action]) -> None:
    assert list(TWO_BY_TWO.dependencies(action)) == needed


def test_a_schedule_shows_by_its_actions_whether_it_has_a_backward_and_splits_it() -> None:
    def schedule(*kinds: Kind) -> Schedule:
        return Schedule("any", 1, 1, 1, (tuple(Action(kind, 0, 0) for kind in kinds),))

    assert [schedule(F).forward_only, schedule(F, B).forward_only] == [True, False]
    assert [schedule(F, B).splits_backward, schedule(F, INPUT, W).splits_backward] == [False, True]
    assert TWO_BY_TWO.num_stages == 4


def test_an_action_is_named_in_words() -> None:
    assert str(Action(W, 3, 7)) == "backward weight stage 3 micro-batch 7"
