"""The requests of a load test and the times at which they are sent; the same seed gives the same ones."""

import random
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from ....core.errors import ConfigError
from ...engine.request.sampling_params import SamplingParams

FIRST_ID = 3  # lower ids are special tokens in most vocabularies


@dataclass(frozen=True)
class Workload:
    """The requests: prompts of random tokens, each of its own length, continued to a given number of tokens.

    Attributes:
        num_requests: the number of requests.
        prompt_tokens: the least and the largest number of tokens of a prompt.
        new_tokens: the least and the largest number of tokens of an answer.
        shared_prefix: the number of tokens with which every prompt begins, as with one system prompt.
        temperature: the temperature of sampling.
        seed: the seed of lengths, tokens and times.

    Raises:
        ConfigError: a number is out of range.
    """

    _: KW_ONLY
    num_requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    shared_prefix: int = 0
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ConfigError(f"{name} is {least} to {most}; write N, or N-M with 1 <= N <= M.")
        if self.num_requests < 1:
            raise ConfigError(f"num_requests is {self.num_requests}; it must be 1 or more.")
        if not 0 <= self.shared_prefix < self.prompt_tokens[0]:
            raise ConfigError(
                f"shared_prefix is {self.shared_prefix}; it must be less than the shortest prompt, "
                f"{self.prompt_tokens[0]} tokens."
            )

    def requests(self, vocab_size: int) -> Iterator[tuple[list[int], SamplingParams]]:
        """Yields the prompt's token ids and the sampling parameters of each request."""
        first = min(FIRST_ID, vocab_size - 1)
        prefix = random.Random(f"prefix {self.seed}").choices(range(first, vocab_size), k=self.shared_prefix)
        for number in range(self.num_requests):
            draw = random.Random(f"{self.seed} {number}")
            length, new = draw.randint(*self.prompt_tokens), draw.randint(*self.new_tokens)
            rest = draw.choices(range(first, vocab_size), k=length - self.shared_prefix)
            params = SamplingParams(
                max_new_tokens=new, ignore_eos=True, temperature=self.temperature, seed=draw.getrandbits(63)
            )
            yield prefix + rest, params

    def arrivals(self, rate: float) -> Iterator[float]:
        """Yields the time of each request in seconds after the start: a Poisson process of `rate` requests per second.

        Callers who know nothing of each other arrive so; they do not wait for the server to answer earlier ones.
        """
        draw, time = random.Random(f"arrivals {self.seed}"), 0.0
        for _ in range(self.num_requests):
            yield time
            time += draw.expovariate(rate)
