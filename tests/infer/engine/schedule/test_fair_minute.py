"""Principals that ask for more than there is, in simulated time: shares by weight, and first tokens beside them.

There are 1 to 50 of them, of equal weights or not, whatever is scarce.
"""

import itertools

import pytest

from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.infer.engine.schedule.simulated_server import Caller, Server, jain

COUNTS = (1, 2, 4, 8, 20, 50)
WEIGHTS = {"equal": (1.0,), "different": (0.5, 1.0, 2.0, 1.0)}
REQUESTS = {  # bounds on the tokens of prompts and answers; none is larger than a share of half a minute
    "alike": [((20, 60), (100, 300))],
    "mixed": [((5, 20), (200, 400)), ((100, 250), (1, 8)), ((20, 60), (20, 60))],
}
ROOM = {"places": (8, 4000), "blocks": (16, 250)}  # what is scarce: places and blocks of each
ROWS = list(itertools.product(COUNTS, WEIGHTS, REQUESTS, ROOM))
ALWAYS = {(2, "different", "mixed", "blocks"), (8, "equal", "mixed", "places")}
SLOWER = 6.0  # seconds until all of fifty have had a first place, where prompts or blocks keep the machine busy


@pytest.mark.parametrize(
    ("count", "weights", "requests", "scarce"),
    [pytest.param(*row, marks=() if row in ALWAYS else pytest.mark.matrix) for row in ROWS],
)
def test_tokens_follow_weights_and_a_first_token_comes_in_time(
    count: int, weights: str, requests: str, scarce: str
) -> None:
    (places, blocks), kinds = ROOM[scarce], REQUESTS[requests]
    greedy = [
        Caller(f"p{i}", WEIGHTS[weights][i % len(WEIGHTS[weights])], 2 * places, *kinds[i % len(kinds)])
        for i in range(count)
    ]
    few = Caller("few", prompt=(20, 20), new=(2, 2), pause=max(2.0, count / 2))  # it asks for less than its share
    server = Server(Limits(places, 5000, 256, 4096), blocks, greedy)
    server.run(5, check_every=500)
    server.callers = [*greedy, few]
    for caller in greedy:
        caller.num_tokens = 0
    server.run(30, check_every=500)
    assert jain(greedy) >= 0.95
    is_busy = count == 50 and (requests, scarce) != ("alike", "places")
    assert max(few.waits) < (SLOWER if is_busy else 2.0) + alone(few)
    assert len(few.waits) > 1


def alone(caller: Caller) -> float:
    """The seconds of the first token of a caller's prompt on an idle server."""
    server = Server(Limits(8, 5000, 256, 4096), 4000, [Caller("alone", prompt=caller.prompt)])
    server.run(1e-6)
    return server.callers[0].waits[0]
