"""Principals of a real server, one of whom takes all places and the queue: first tokens of others, and all answers."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.infer.serve.test_status_table import seen
from tk.tests.infer.serve.tiny_model import write_tiny_model

PLACES: Final = 2
QUEUED: Final = 1
LONG: Final = 1900  # new tokens
CALLERS: Final = (
    Caller("hog", frozenset({GENERATE})),
    Caller("few", frozenset({GENERATE})),
    Caller("light", frozenset({GENERATE}), 0.5),
    Caller("ops", frozenset({GENERATE, ADMIN})),
)


class Callers:
    """Calls of the principals."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.generation: Any = GenerationStub(channel)
        self.admin: Any = AdminStub(channel)

    def ask(self, who: str, seed: int, num_new: int) -> Any:
        """A stream of an answer, which its prompt, seed and length decide."""
        request = pb.GenerateRequest(text=f"prompt {seed} ", sampling={"seed": seed, "temperature": 1.0})
        request.stopping.max_new_tokens, request.stopping.ignore_eos = num_new, True
        return self.generation.Generate(request, metadata=bearer(who), timeout=WAIT_SECONDS)

    def load(self) -> pb.Load:
        load: pb.Load = self.admin.GetLoad(pb.GetLoadRequest(), metadata=bearer("ops"), timeout=WAIT_SECONDS)
        return load

    def wait_idle(self) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while (load := self.load()).running + load.waiting:
            assert time.monotonic() < end, load
            time.sleep(0.005)


def bearer(who: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {who}"),)


def tokens_of(call: Any) -> list[int]:
    return [token for event in call if event.WhichOneof("event") == "delta" for token in event.delta.token_ids]


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    folder: Path = tmp_path_factory.mktemp("shares")
    tokens = folder / "tokens"
    tokens.write_text("".join(line_of(token_digest(caller.principal), caller) for caller in CALLERS))
    model = write_tiny_model(folder / "model", 2048)
    options = f"--kv-blocks 300 --max-running {PLACES} --max-queued {QUEUED}".split()
    serving = Serving(str(model), "--tokens", str(tokens), *options).wait_ready()
    with grpc.insecure_channel(serving.target) as channel:
        yield Callers(channel)
    serving.close()


def test_one_who_takes_all_places_and_the_queue_yields_to_others_and_no_answer_changes(callers: Callers) -> None:
    alone = tokens_of(callers.ask("ops", 0, LONG))
    calls = [callers.ask("hog", 0, LONG) for _ in range(PLACES + QUEUED)]
    answers: dict[int, list[int]] = {}

    def read(place: int) -> None:
        answers[place] = tokens_of(calls[place])

    readers = [threading.Thread(target=read, args=(place,)) for place in range(len(calls))]
    for reader in readers:
        reader.start()
    while (load := callers.load()).running + load.waiting < PLACES + QUEUED or load.running < PLACES:
        assert len(answers) < PLACES, "they end too soon to fill the server"
        time.sleep(0.005)
    with pytest.raises(grpc.RpcError) as caught:
        tokens_of(callers.ask("hog", 0, 1))
    code, details = seen(caught.value)
    assert (code, details["QuotaFailure"].violations[0].subject) == ("RESOURCE_EXHAUSTED", "queue")
    short = [tokens_of(callers.ask(who, 0, 20)) for who in ("few", "light")]
    assert not answers, "the first answers of the other one end later than all of those of others"
    assert short == [alone[:20]] * 2
    for reader in readers:
        reader.join(WAIT_SECONDS)
    assert answers == dict.fromkeys(range(len(calls)), alone)
    callers.wait_idle()
    report = callers.admin.CheckCache(pb.CheckCacheRequest(), metadata=bearer("ops"), timeout=WAIT_SECONDS)
    assert (list(report.problems), report.leaked, report.used) == ([], 0, 0)
