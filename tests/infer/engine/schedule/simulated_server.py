"""A server in simulated time, without a model: callers that keep it busy, and what they see of it."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tk.core.errors import Overloaded
from tk.infer.engine.schedule.samples.sample import Sample, Status
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.step_cost import StepSize
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.tests.infer.engine.schedule.new_sample import new_sample

BLOCK = 16


@dataclass
class Caller:
    """A principal that keeps some requests live, of random lengths between bounds; `most` = None: all that it may."""

    name: str
    weight: float = 1.0
    most: int | None = 1
    prompt: tuple[int, int] = (10, 40)
    new: tuple[int, int] = (2, 8)
    pause: float = 0.0  # the most seconds from the end of a request to the next one
    num_samples: int = 1
    live: list[Sample] = field(default_factory=list)
    num_refused: int = 0
    num_tokens: int = 0  # of prompts and answers, each counted once
    waits: list[float] = field(default_factory=list)  # for first tokens, in seconds
    again_at: float = 0.0


@dataclass
class Server:
    """The scheduler, and a machine whose steps take a known time."""

    limits: Limits
    num_blocks: int
    callers: Sequence[Caller]
    seed: int = 0
    speed: float = 1.0  # of steps
    now: float = 0.0
    num_steps: int = 0
    num_preempted_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)
        self.policy = Scheduler(self.limits, self.num_blocks, BLOCK)
        self.arrivals: dict[Sample, float] = {}
        self.seen: Counter[Sample] = Counter()

    def run(self, seconds: float, check_every: int = 50) -> None:
        """Runs for so many simulated seconds."""
        end = self.now + seconds
        while self.now < end:
            for caller in self.callers:
                self.ask(caller)
            self.step()
            if self.num_steps % check_every == 0:
                self.policy.check_integrity()

    def ask(self, caller: Caller) -> None:
        """Lets a caller send a request, if it wants one more and was not just refused."""
        caller.live = [s for s in caller.live if s.status is not Status.FINISHED]
        if self.now < caller.again_at or (caller.most is not None and len(caller.live) >= caller.most):
            return
        self.send(caller, self.choose.randint(*caller.prompt), self.choose.randint(*caller.new))

    def send(self, caller: Caller, num_prompt: int, num_new: int, priority: int = 0) -> list[Sample]:
        """Sends a request; an empty list if it is refused."""
        arrival = len(self.arrivals)
        new = [
            new_sample(
                arrival,
                [arrival] * num_prompt,
                num_prompt + num_new,
                index=index,
                priority=priority,
                principal=caller.name,
                weight=caller.weight,
                root=str(arrival).encode(),
            )
            for index in range(caller.num_samples)
        ]
        try:
            self.policy.add(new, self.now)
        except Overloaded as error:
            caller.num_refused += 1
            caller.again_at = self.now + (error.retry_after or 1.0)
            return []
        self.arrivals.update(dict.fromkeys(new, self.now))
        caller.live += new
        return new

    def step(self) -> None:
        """Carries out one step."""
        self.policy.expire(self.now)
        before = self.policy.activity.num_preempted
        chunks = self.policy.schedule()
        self.num_preempted_at += [self.now] * (self.policy.activity.num_preempted - before)
        callers = {caller.name: caller for caller in self.callers}
        size = StepSize()
        for chunk in chunks:
            size = size.plus(chunk.start, chunk.length)
        seconds = self.seconds(size)
        self.now += seconds
        self.num_steps += 1
        for chunk in chunks:
            sample, last = chunk.sample, chunk.is_last
            caller = callers[sample.request.principal]
            caller.num_tokens += max(0, chunk.stop - max(chunk.start, self.seen[sample]))
            self.seen[sample] = max(self.seen[sample], chunk.stop)
            self.policy.advance(chunk)
            if last:
                sample.output.tokens.append(len(sample.output.tokens) % 7)
                if sample.num_new == 1:
                    caller.waits.append(self.now - self.arrivals[sample])
                if sample.num_tokens == sample.output.max_tokens:
                    self.policy.finish(sample)
                    caller.again_at = self.now + self.choose.uniform(0, caller.pause)
        self.policy.observe(chunks, seconds)

    def seconds(self, size: StepSize) -> float:
        return (0.01 + 5e-4 * size.num_tokens + 1e-7 * size.num_keys) / self.speed


def jain(callers: Sequence[Caller]) -> float:
    """Jain's index of the tokens of callers, per weight: 1 if all have the same."""
    shares = [caller.num_tokens / caller.weight for caller in callers]
    return sum(shares) ** 2 / (len(shares) * sum(each * each for each in shares))
