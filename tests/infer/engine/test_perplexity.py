"""Perplexity in windows: each token is scored once, after the context that the windows promise."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tk.core.errors import ConfigError
from tk.infer import LLM
from tk.infer.engine.perplexity import EvalText, measure_perplexity, num_scored, plan_windows


def text(length: int, factor: int = 7) -> EvalText:
    return EvalText(np.array([(factor * i * i + 3 * i) % 260 for i in range(length)], np.int64))


def loss_by_transformers(model: LlamaForCausalLM, tokens: list[int], context: int) -> float:
    """Returns the mean loss after at most context - 1 tokens, each window by the model's own loss."""
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, context - 1):
            ids = torch.tensor([tokens[start : start + context]])
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
    return total / (len(tokens) - 1)


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(2, 12), st.data())
def test_every_token_but_the_first_is_scored_once_in_order(
    lengths: list[int], context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    scored = []
    for window in plan_windows(lengths, context, stride):
        assert 0 <= window.start < window.first < window.stop <= lengths[window.text]
        assert window.stop - window.start <= context
        assert window.start == 0 or window.first - window.start >= max(1, context - stride)
        scored += [(window.text, place) for place in range(window.first, window.stop)]
    assert scored == [(number, place) for number, length in enumerate(lengths) for place in range(1, length)]


@pytest.mark.parametrize("length", [2, 63, 64, 65, 300])
def test_loss_equals_that_of_transformers(llm: LLM, reference: Callable[[str], LlamaForCausalLM], length: int) -> None:
    given_text = text(length)
    found = measure_perplexity(llm, [given_text], context=64, stride=64)
    expected = loss_by_transformers(reference("grouped"), given_text.tokens.tolist(), 64)
    assert found.loss == pytest.approx(expected, abs=1e-4)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-3)
    assert len(found.logprobs) == len(found.greedy) == length - 1


def test_a_stride_gives_tokens_more_context(llm: LLM, reference: Callable[[str], LlamaForCausalLM]) -> None:
    tokens = text(100).tokens
    found = measure_perplexity(llm, [EvalText(tokens)], context=32, stride=1)
    with torch.no_grad():
        rows = [
            reference("grouped")(torch.tensor([tokens[max(0, i - 31) : i].tolist()])).logits[0, -1]
            for i in range(1, 100)
        ]
    expected = torch.stack(rows).double().log_softmax(-1)[torch.arange(99), torch.from_numpy(tokens[1:])]
    np.testing.assert_allclose(found.logprobs, expected.numpy(), atol=1e-4)
    assert found.num_windows == 31 - 30 + 68


def test_texts_are_apart_and_a_mask_leaves_tokens_out(llm: LLM) -> None:
    one, two = text(40), text(50, factor=11)
    counted = np.arange(50) % 3 == 0
    masked = EvalText(two.tokens, counted)
    done: list[int] = []
    found = measure_perplexity(llm, [one, EvalText(one.tokens[:1]), masked], 32, 32, done.append)
    alone = [measure_perplexity(llm, [each], 32, 32) for each in (one, two)]
    np.testing.assert_array_equal(found.logprobs[:39], alone[0].logprobs)
    np.testing.assert_array_equal(found.logprobs[39:], alone[1].logprobs[counted[1:]])
    assert sum(done) == num_scored([one, masked]) == 39 + 49


def test_changes_are_counted(llm: LLM) -> None:
    found = measure_perplexity(llm, [text(40)], 32, 32)
    other = measure_perplexity(llm, [text(40)], 8, 8)
    assert found.num_changed(found) == 0
    assert found.num_changed(other) == sum(a != b for a, b in zip(found.greedy, other.greedy, strict=True)) > 0


@pytest.mark.parametrize(
    ("lengths", "context", "stride", "words"),
    [
        ([9], 1, 1, "context = 1"),
        ([9], 8, 9, "stride = 9"),
        ([9], 8, 0, "stride = 0"),
        ([1, 0], 8, 8, "no token to score"),
    ],
)
def test_a_text_that_cannot_be_measured_is_refused(
    llm: LLM, lengths: list[int], context: int, stride: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        measure_perplexity(llm, [text(length) for length in lengths], context, stride)
