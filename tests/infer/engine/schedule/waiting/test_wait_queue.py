"""The order of waiting samples, and the backlog before a new one."""

import random

from tk.infer.engine.schedule.samples.sample import Sample
from tk.infer.engine.schedule.waiting.fair_share import FairShare
from tk.infer.engine.schedule.waiting.wait_queue import WaitQueue
from tk.tests.infer.engine.schedule.new_sample import new_sample


def make(arrival: int, priority: int = 0, principal: str = "", weight: float = 1.0, length: int = 10) -> Sample:
    return new_sample(arrival, range(length), length + 1, priority=priority, principal=principal, weight=weight)


def served(queue: WaitQueue, shares: FairShare) -> list[int]:
    """The order in which a queue is served to its end."""
    order = []
    while (sample := queue.first()) is not None:
        queue.discard(sample)
        queue.check_integrity()
        shares.charge(sample.request.principal, sample.num_tokens)
        order.append(sample.arrival)
    return order


def queued(*samples: Sample) -> tuple[WaitQueue, FairShare]:
    shares = FairShare()
    queue = WaitQueue(shares)
    for sample in samples:
        shares.enter(sample.request.principal, sample.request.weight)
        queue.push(sample)
        queue.check_integrity()
    return queue, shares


def test_priorities_come_first_then_arrival() -> None:
    waiting = [make(0), make(1, priority=-2), make(2, priority=7), make(3), make(4, priority=7)]
    assert served(*queued(*waiting)) == [2, 4, 0, 3, 1]


def test_a_principal_with_many_requests_does_not_delay_another() -> None:
    waiting = [*(make(i, principal="many") for i in range(6)), make(6, principal="few"), make(7, principal="few")]
    assert served(*queued(*waiting)) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_twice_the_weight_is_twice_the_share() -> None:
    waiting = [make(i, principal="ab"[i % 2], weight=(1.0, 2.0)[i % 2]) for i in range(60)]
    first = served(*queued(*waiting))[:30]
    assert sum(arrival % 2 for arrival in first) == 20


def test_any_removals_leave_the_rest_in_order() -> None:
    choose = random.Random(1)
    waiting = [make(i, priority=choose.randint(-2, 2)) for i in range(300)]
    queue, shares = queued(*waiting)
    gone = set(choose.sample(range(300), 250))
    for arrival in gone:
        queue.discard(waiting[arrival])
        queue.discard(waiting[arrival])
    queue.check_integrity()
    expected = sorted((s for s in waiting if s.arrival not in gone), key=lambda s: s.order)
    assert served(queue, shares) == [sample.arrival for sample in expected]
    assert not len(queue)


def test_backlog_counts_the_tokens_served_before() -> None:
    queue, _ = queued(make(0, priority=-1, length=5), make(1, length=10), make(2, priority=1, length=20))
    assert queue.backlog(make(3, priority=-1)) == 35
    assert queue.backlog(make(3)) == 30
    assert queue.backlog(make(3, priority=1)) == 20
    assert queue.backlog(make(3, priority=2)) == 0


def test_backlog_of_others_counts_no_more_than_the_fair_share() -> None:
    queue, _ = queued(*(make(i, principal="many", length=100) for i in range(50)))
    assert queue.backlog(make(50, principal="many", length=10)) == 5000
    assert queue.backlog(make(50, principal="few", length=10)) == 10, "both have half of the tokens"
    assert queue.backlog(make(50, principal="few", weight=0.1, length=10)) == 100
