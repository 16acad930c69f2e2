"""Every architecture served: `transformers`' tokens, and bits that depend on nothing but a request's own tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tk.infer import LLM, SamplingParams
from tk.infer.engine.kernels.backend import Backend
from tk.tests.example_counts import sized
from tk.tests.infer.history import History
from tk.tests.model.architectures import ENTRIES, VOCAB

NUM_NEW, FEW = sized(24, 16), sized(8, 5)  # tokens, and blocks that are too few for all at once
CHOSEN = ("qwen2 sliding", "qwen2_moe", "gpt2")  # each kind of attention, layer and position; the second has YaRN
PROMPTS = tuple(
    [int(token) for token in np.random.default_rng(i).integers(0, VOCAB, length)]
    for i, length in enumerate((3, 37, 17, 1, 20, 33))
)
GREEDY = SamplingParams(temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)


def _expected(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_NEW, "do_sample": False}
        with torch.no_grad():
            found.append(model.generate(ids, **options)[0, len(prompt) :].tolist())
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHOSEN else pytest.mark.matrix) for name in ENTRIES]
)
def test_greedy_equals_transformers_alone_and_in_company(
    make_runner: Callable[..., Backend], tmp_path: Path, name: str
) -> None:
    expected = _expected(ENTRIES[name].make(tmp_path))
    runner = make_runner(tmp_path, "fp32", "fp32", 100)
    every_prompt = range(len(PROMPTS))
    alone = [History(runner, 100, 512, PROMPTS, NUM_NEW).run([i]) for i in every_prompt]
    assert [history.tokens[i] for i, history in enumerate(alone)] == expected
    for num_blocks, budget in ((100, 512), (100, 23), (FEW, 64)):
        together = History(runner, num_blocks, budget, PROMPTS, NUM_NEW).run(every_prompt)
        assert (together.preemptions > 0) == (num_blocks == FEW)
        for i in every_prompt:
            assert torch.equal(torch.stack(together.logits[i]), torch.stack(alone[i].logits[i])), (i, num_blocks)


@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("qwen2_moe", "qwen3_moe", "gpt2"))]
)
def test_bf16_bits_depend_on_a_request_alone(make_runner: Callable[..., Backend], tmp_path: Path, name: str) -> None:
    ENTRIES[name].make(tmp_path)
    runner = make_runner(tmp_path, "bf16", "bf16", 100)
    together = History(runner, 100, 23, PROMPTS, NUM_NEW).run(range(len(PROMPTS)))
    for i in range(len(PROMPTS)):
        alone = History(runner, 100, 512, PROMPTS, NUM_NEW).run([i])
        assert torch.equal(torch.stack(together.logits[i]), torch.stack(alone.logits[i])), i


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("mixtral", 2),
        pytest.param("qwen3", 2, marks=pytest.mark.matrix),
        pytest.param("gpt2", 1, marks=pytest.mark.matrix),
        pytest.param("mistral", 1, marks=pytest.mark.matrix),
    ],
)
def test_workers_give_the_tokens_of_transformers(tmp_path: Path, name: str, tp: int) -> None:
    expected = _expected(ENTRIES[name].make(tmp_path))
    with LLM(tmp_path, tp=tp, kv_blocks=40) as llm:
        assert [list(completion.token_ids) for completion in llm.generate(PROMPTS, GREEDY)] == expected
