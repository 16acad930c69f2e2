"""A trained chat model, SmolLM2-135M-Instruct, in fp32: log-probabilities and greedy tokens as by transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tk.infer import LLM, SamplingParams

pytestmark = pytest.mark.real
TEXT = """def mean(values):
    # The mean of some numbers, which must not be none: 1.5 for 1 and 2.
    return sum(values) / len(values)

Die Hauptstadt von Frankreich ist Paris. 東京は日本の首都です。
"""
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def expected(smollm: Path) -> tuple[list[int], torch.Tensor, list[int]]:
    """Tokens of the text, their log-probabilities [tokens - 1, vocab], and the tokens that follow greedily."""
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(smollm)(TEXT).input_ids
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        whole = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    return ids, logprobs, whole[0, len(ids) :].tolist()


@pytest.mark.parametrize("kernels", ["native", "aten"])
@pytest.mark.parametrize("tp", [1, 3])
def test_logprobs_and_greedy_tokens_equal_transformers(
    smollm: Path, expected: tuple[list[int], torch.Tensor, list[int]], kernels: str, tp: int
) -> None:
    ids, logprobs, new = expected
    with LLM(smollm, tp=tp, threads=1, dtype="fp32", kernels=kernels, max_model_len=512, kv_blocks=64) as llm:
        score = llm.score(ids[:1], ids[1:])
        [completion] = llm.generate([ids], SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True))
    chosen = logprobs[torch.arange(len(ids) - 1), ids[1:]]
    torch.testing.assert_close(torch.tensor(score.logprobs), chosen, rtol=0, atol=1e-3)
    assert score.greedy_token_ids == tuple(logprobs.argmax(-1).tolist())
    assert list(completion.token_ids) == new
