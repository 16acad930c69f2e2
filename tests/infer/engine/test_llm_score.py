"""`LLM.score` against `transformers`, which computes all logits of the same tokens."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from tk.core.errors import InvalidRequest, PromptTooLong
from tk.infer import LLM, SamplingParams, Score
from tk.tests.infer.engine.free_blocks import num_free_blocks

PROMPT = [5, 6, 7]
LONG = [(7 * i * i + 3 * i) % 260 for i in range(150)]  # more than three steps of this engine


def by_transformers(model: LlamaForCausalLM, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    """Log-probabilities [len(continuation), vocab]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + continuation])).logits[0]
    logprobs: torch.Tensor = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs


def check(score: Score, expected: torch.Tensor, continuation: list[int]) -> None:
    assert score.token_ids == tuple(continuation)
    chosen = expected[torch.arange(len(continuation)), continuation]
    torch.testing.assert_close(torch.tensor(score.logprobs), chosen, rtol=0, atol=1e-4)
    assert score.greedy_token_ids == tuple(expected.argmax(-1).tolist())
    assert score.total == pytest.approx(float(chosen.sum()), abs=1e-4 * len(continuation))


@pytest.mark.parametrize(("prompt", "continuation"), [(PROMPT, [9]), (PROMPT, LONG), (LONG, PROMPT), ([1], [2, 3])])
def test_log_probabilities_equal_transformers(
    llm: LLM, reference: Callable[[str], LlamaForCausalLM], prompt: list[int], continuation: list[int]
) -> None:
    score = llm.score(prompt, continuation)
    check(score, by_transformers(reference("grouped"), prompt, continuation), continuation)
    assert score.prompt_tokens == len(prompt)
    assert not score.is_greedy


def test_many_continuations_of_one_prompt_in_order(llm: LLM, reference: Callable[[str], LlamaForCausalLM]) -> None:
    continuations = [[i, i + 1, i + 2] for i in range(40, 52)]
    scores = llm.score(PROMPT, continuations)
    for score, continuation in zip(scores, continuations, strict=True):
        check(score, by_transformers(reference("grouped"), PROMPT, continuation), continuation)
    assert llm.score(PROMPT, continuations[:0]) == []
    assert llm.score(PROMPT, [continuations[0]]) == [llm.score(PROMPT, continuations[0])]


def test_greedy_text_is_greedy(llm: LLM) -> None:
    [completion] = llm.generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True, logprobs=0))
    score = llm.score(PROMPT, completion.token_ids)
    assert score.is_greedy
    assert score.logprobs == tuple(token.logprob for token in completion.logprobs)


def test_text_is_split_after_the_tokens_of_the_prompt(llm: LLM) -> None:
    assert llm.engine.tokenizer is not None
    whole = llm.engine.tokenizer.encode("the error")
    assert llm.score("the", " error") == llm.score(whole[: llm.score("the", " error").prompt_tokens], " error")
    assert llm.score("the", " error").token_ids == tuple(whole[2:])  # "th", "e"


def test_a_token_that_spans_the_border_is_scored(llm: LLM, reference: Callable[[str], LlamaForCausalLM]) -> None:
    assert llm.engine.tokenizer is not None
    whole = llm.engine.tokenizer.encode("a th")  # whose last token is "th"
    score = llm.score("a t", "h")
    assert score.prompt_tokens == len(whole) - 1
    check(score, by_transformers(reference("grouped"), whole[:-1], whole[-1:]), whole[-1:])
    with pytest.raises(InvalidRequest, match="no tokens of its own"):
        llm.score("t", "h")


def test_a_score_may_be_as_long_as_the_model_and_no_longer(llm: LLM) -> None:
    longest = llm.engine.info.max_model_len
    assert len(llm.score([1], [2] * (longest - 1)).logprobs) == longest - 1
    with pytest.raises(PromptTooLong):
        llm.score([1], [2] * longest)
    with pytest.raises(InvalidRequest, match="below the vocabulary"):
        llm.score([1], [2, 9999])


def test_more_scores_than_the_cache_holds_equal_those_alone(llm: LLM) -> None:
    pairs = [(LONG[: 20 + i], LONG[20 + i :] + LONG) for i in range(8)]  # together more than the cache
    together = llm.score_pairs(pairs)
    assert together == [llm.score(prompt, continuation) for prompt, continuation in pairs]
    assert (llm.engine.num_live, num_free_blocks(llm.engine)) == (0, llm.engine.info.num_blocks)
