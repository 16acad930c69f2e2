"""The callers of bench_soak.py, at a real server of a tiny model: every call ends once, readers' pauses count."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from tk.benchmarks.bench_soak import promises
from tk.benchmarks.serving.soak_load import NEW_TOKENS, PROMPT_TOKENS, DyingClient, Load, Seen, requests
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.infer.serve.tiny_model import write_tiny_model

VOCAB = 264


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(str(write_tiny_model(tmp_path / "model")), "--max-running", "4", "--max-queued", "6")
    yield serving.wait_ready()
    serving.close()


def test_calls_end_once_readers_pauses_count_and_the_dead_leave_nothing(serving: Serving) -> None:
    asked = requests(40, VOCAB)

    async def loads(dying: DyingClient) -> tuple[Seen, Seen]:
        async with grpc.aio.insecure_channel(serving.target) as channel:
            load = Load(channel, asked, slowness=0.01)
            loop = await load.closed(4, 12)
            crowd = await load.open(200.0, [dying])
            admin = AdminStub(channel)
            while (now := await admin.GetLoad(pb.GetLoadRequest(), timeout=WAIT_SECONDS)).running:
                pass  # the server has yet to notice the death
            report = await admin.CheckCache(pb.CheckCacheRequest(), timeout=WAIT_SECONDS)
            assert (report.leaked, report.used) == (0, 0)
            assert now.prefix_hit_rate == 0, "no load finds the prompts of one before"
            return loop, crowd

    with closing(DyingClient(serving.target, 0.1)) as dying:
        loop, crowd = asyncio.run(loads(dying))
    assert loop.ends == {"OK": 12}
    # A message has one token or more, and the first one of a call follows no pause.
    assert 0 < len(loop.gaps) <= sum(each.stopping.max_new_tokens - 1 for each in asked[:12])
    assert crowd.ends.total() == 40
    assert set(crowd.ends) <= {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    assert min(crowd.ends["OK"], crowd.ends["CANCELLED"]) > 0
    assert min(loop.seconds, crowd.seconds, *loop.gaps) >= 0 < len(crowd.gaps)


def test_requests_have_lengths_of_their_own_and_are_the_same_for_a_seed() -> None:
    made = requests(50, VOCAB, seed=1)
    assert made == requests(50, VOCAB, seed=1) != requests(50, VOCAB)
    for value, (least, most) in (
        (lambda each: len(each.tokens.ids), PROMPT_TOKENS),
        (lambda each: each.stopping.max_new_tokens, NEW_TOKENS),
    ):
        assert least <= min(map(value, made)) < max(map(value, made)) <= most


def test_the_pauses_of_a_crowd_are_compared_with_those_of_a_closed_loop_and_with_the_bound() -> None:
    loop, crowd = Seen(gaps=[0.02] * 98 + [0.04] * 2), Seen(gaps=[0.02] * 98 + [0.05] * 2)
    beside, bound = promises([loop, Seen(gaps=[0.06])], crowd, 45.0)
    assert (beside.found, bound.found) == pytest.approx((1.25, 50.0))
    assert (beside.is_kept, bound.is_kept) == (True, False)
