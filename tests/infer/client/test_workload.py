"""The requests of a load test: lengths, prefixes, times, and that a seed repeats them."""

from itertools import pairwise

import pytest

from tk.core.errors import ConfigError
from tk.infer.client.load_test import FIRST_ID, Workload


def test_prompts_and_answers_have_the_lengths_and_the_prefix() -> None:
    workload = Workload(num_requests=200, prompt_tokens=(16, 20), new_tokens=(3, 5), shared_prefix=8)
    requests = list(workload.requests(100))
    assert {len(prompt) for prompt, _ in requests} == {16, 17, 18, 19, 20}
    assert {params.max_new_tokens for _, params in requests} == {3, 4, 5}
    assert len({tuple(prompt[:8]) for prompt, _ in requests}) == 1
    assert len({tuple(prompt) for prompt, _ in requests}) == 200
    assert all(FIRST_ID <= token < 100 for prompt, _ in requests for token in prompt)
    assert all(params.ignore_eos for _, params in requests)


def test_a_seed_repeats_all() -> None:
    def made(seed: int) -> tuple[list[object], list[float]]:
        workload = Workload(num_requests=20, prompt_tokens=(8, 30), new_tokens=(1, 9), seed=seed)
        return list(workload.requests(50)), list(workload.arrivals(3.0))

    assert made(1) == made(1)
    assert made(1)[0] != made(2)[0]
    assert made(1)[1] != made(2)[1]


def test_arrivals_are_a_poisson_process() -> None:
    times = list(Workload(num_requests=4000, prompt_tokens=(1, 1), new_tokens=(1, 1)).arrivals(20.0))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03), "as gaps of 1 / e are longer"
    assert times[0] == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"prompt_tokens": (0, 4)},
        {"new_tokens": (5, 4)},
        {"shared_prefix": 8},
        {"shared_prefix": -1},
    ],
)
def test_a_workload_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"num_requests": 1, "prompt_tokens": (8, 8), "new_tokens": (1, 1)} | wrong
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Workload(**fields)  # type: ignore[arg-type]
