"""Groups of samples: one leads until the prompt is computed, and another one if it ends before."""

from tk.infer.engine.schedule.samples.sample import Sample
from tk.infer.engine.schedule.waiting.request_queue import SampleGroups
from tk.tests.infer.engine.schedule.new_sample import new_sample


def samples(count: int) -> list[Sample]:
    return [new_sample(0, [1], 2, index=index) for index in range(count)]


def test_followers_part_from_their_leader_once() -> None:
    groups, (leader, *followers) = SampleGroups(), samples(3)
    groups.add([leader, *followers])
    assert (len(groups), set(groups)) == (2, set(followers))
    assert groups.part(followers[0]) == []
    assert groups.part(leader) == followers
    assert groups.part(leader) == []
    assert len(groups) == 0


def test_one_sample_is_no_group() -> None:
    groups, (alone,) = SampleGroups(), samples(1)
    groups.add([alone])
    assert len(groups) == 0
    assert groups.leave(alone) is None


def test_a_leader_that_leaves_is_followed_by_the_next() -> None:
    groups, (leader, second, third, fourth) = SampleGroups(), samples(4)
    groups.add([leader, second, third, fourth])
    assert groups.leave(third) is None
    assert groups.leave(leader) is second
    assert set(groups) == {fourth}
    assert groups.leave(second) is fourth
    assert len(groups) == 0
    assert groups.part(fourth) == []
