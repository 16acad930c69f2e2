"""Places by fair shares, in simulated time: first tokens within a bound, shares by weight, few preemptions."""

import random

import pytest

from tk.infer.engine.schedule.samples.sample import Status
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.infer.engine.schedule.simulated_server import Caller, Server, jain

LIMITS = Limits(max_running=8, max_queued=1000, max_batched_tokens=256, max_model_len=4096)
SECONDS = 2.0


def hog(**options: object) -> Caller:
    """A caller of long requests, as many as it may have."""
    return Caller("hog", most=None, prompt=(50, 400), new=(500, 2000), **options)  # type: ignore[arg-type]


def alone(server: Server, num_prompt: int) -> float:
    """The seconds of a prompt alone."""
    other = Server(server.limits, server.num_blocks, [caller := Caller("a")], speed=server.speed)
    other.send(caller, num_prompt, 1)
    other.run(1e-6)
    while not caller.waits:
        other.step()
    return caller.waits[0]


def test_long_requests_in_all_places_yield_one_to_another_principal() -> None:
    server = Server(LIMITS, 4000, [greedy := Caller("hog", most=16, prompt=(16, 16), new=(3000, 3000)), Caller("b")])
    server.callers = [greedy]
    server.run(5)
    few = Caller("few", most=0)
    server.callers = [greedy, few]
    [short] = server.send(few, 20, 2)
    server.run(SECONDS)
    assert short.status is Status.FINISHED
    assert few.waits[0] < 0.1, "no place has just been given"
    assert len(server.policy.running) == 8, "no place stays empty"


def test_a_prompt_that_takes_all_tokens_of_steps_keeps_nobody_from_a_free_place() -> None:
    server = Server(LIMITS, 4000, [long := Caller("long", most=0), few := Caller("few", most=0)])
    [prompt] = server.send(long, 4000, 1)
    server.step()
    [short] = server.send(few, 20, 1)
    for _ in range(3):
        server.step()
    assert short.status is Status.FINISHED
    assert prompt.num_uncomputed > 2000


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.matrix if s > 2 else ()) for s in range(12)])
def test_first_tokens_come_in_time_beside_one_who_takes_all(seed: int) -> None:
    choose = random.Random(seed)
    count = choose.choice((1, 2, 5, 20, 50))
    pause = max(2.0, count / 8)  # they ask for less than their shares
    others = [
        Caller(f"p{i}", weight=choose.choice((0.5, 1.0, 1.0, 2.0)), prompt=(5, 60), new=(1, 8), pause=pause)
        for i in range(count)
    ]
    most, tokens = choose.choice((4, 8, 64)), choose.choice((64, 256))
    limits = Limits(most, choose.choice((0, 20, 200)), tokens, 4096, max_queued_tokens=choose.choice((None, 2000)))
    server = Server(limits, choose.choice((600, 4000)), [greedy := hog()], seed)
    server.run(10)
    server.callers = [greedy, *others]
    server.run(20)
    bound = SECONDS + alone(server, 60)
    assert max(max(caller.waits) for caller in others) < bound
    assert greedy.num_refused > 0, "it fills the queue"
    assert sum(caller.num_refused for caller in others) == 0
    assert greedy.num_tokens > 0
    server.policy.check_integrity()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.matrix if seed > 1 else ()) for seed in range(10)]
)
def test_tokens_of_a_minute_are_shared_by_weight(seed: int) -> None:
    choose = random.Random(100 + seed)
    count = choose.choice((2, 3, 5, 11, 50))
    callers = [
        Caller(f"p{i}", choose.choice((0.5, 1.0, 2.0)), choose.choice((8, 16, 30)), (5, 200), (100, 1500))
        for i in range(count)
    ]
    server = Server(Limits(8, 5000, 256, 4096), choose.choice((1500, 8000)), callers, seed)
    server.run(60)
    assert jain(callers) >= 0.95
    rate = len(server.num_preempted_at) / server.now
    assert rate < 16, "preemptions per second"
    assert sum(c.num_tokens for c in callers) > 0
    server.policy.check_integrity()


@pytest.mark.parametrize("seconds", [20, *(pytest.param(n, marks=pytest.mark.matrix) for n in (30, 60, 200))])
def test_one_that_took_what_others_left_has_its_share_when_they_ask_for_theirs(seconds: int) -> None:
    greedy = Caller("hog", most=None, prompt=(20, 20), new=(400, 400))
    others = [Caller(f"p{i}", prompt=(20, 20), new=(400, 400)) for i in range(3)]
    limits = Limits(max_running=32, max_queued=200, max_batched_tokens=256, max_model_len=4096)
    server = Server(limits, 8000, [greedy, *others], speed=0.5)
    server.run(seconds, check_every=1000)
    assert greedy.num_tokens > 20 * others[0].num_tokens, "29 places of 32"
    for caller in server.callers:
        caller.num_tokens = 0
    for caller in others:
        caller.most = 64
    server.run(10, check_every=1000)
    assert jain(server.callers) >= 0.95


def test_a_newcomer_does_not_wait_until_another_has_caught_up_with_a_long_prompt() -> None:
    many = Caller("many", most=None, prompt=(10, 10), new=(300, 300))
    long, few = Caller("long", most=0), Caller("few", most=0)
    server = Server(Limits(8, 500, 256, 40_000), 8000, [many, long, few])
    server.run(3)
    [answer] = server.send(long, 20_000, 300)
    while answer.num_new < 3:
        server.step()
    server.send(few, 20, 2)
    server.run(SECONDS)
    assert few.waits, "many is owed 20,000 tokens, and has seven places of eight"
