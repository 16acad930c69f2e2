"""The work of a step does not grow with the number of waiting requests: executed instructions are counted, not time."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.samples.sample import Output, Sample
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.waiting.admission import Limits


class Counted(Sample):
    """A sample that counts comparisons, which loops inside C functions make."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return self is other

    __hash__ = object.__hash__


def make(arrival: int) -> Sample:
    request = Request(
        (1,) * 8,
        SamplingParams(),
        f"r{arrival}",
        priority=arrival % 3,
        principal=f"p{arrival % 50}",
        deadline=1e9 + arrival,
    )
    return Counted(request, 0, arrival, 0, Output(12))


def count(action: Callable[[Any], Any], argument: object) -> int:
    """The number of bytecode instructions, and of comparisons of samples, of an action."""
    total = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal total
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        total += event == "opcode"
        return trace

    before, Counted.comparisons = sys.gettrace(), 0
    sys.settrace(trace)
    try:
        action(argument)
    finally:
        sys.settrace(before)
    return total + Counted.comparisons


def step(policy: Scheduler) -> None:
    policy.expire(0.0)
    for chunk in policy.schedule():
        last = chunk.is_last
        policy.advance(chunk)
        if last:
            chunk.sample.output.tokens.append(0)
            if chunk.sample.num_tokens == chunk.sample.output.max_tokens:
                policy.finish(chunk.sample)


def work(num_waiting: int) -> tuple[int, int, int]:
    """The most instructions of a step, of a cancellation and of an arrival, with so many waiting."""
    policy = Scheduler(Limits(8, 1_000_000, 64, 64), 16, 4)
    samples = [make(i) for i in range(num_waiting)]
    for sample in samples:
        policy.add([sample])
    steps = max(count(step, policy) for _ in range(40))
    cancels = max(count(policy.finish, gone) for gone in samples[num_waiting // 2 :: 97][:20])
    arrivals = max(count(policy.add, [make(new)]) for new in range(num_waiting, num_waiting + 20))
    return steps, cancels, arrivals


def test_thirty_thousand_waiting_requests_cost_no_more_than_a_thousand() -> None:
    few, many = work(1_000), work(30_000)
    assert all(more <= 2 * less for less, more in zip(few, many, strict=True)), (few, many)
