"""Scores: the split of prompt and continuation into tokens, and the request for a score."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.engine.request.score import score_request, split_tokens
from tk.text.chat_context import NEW_TURN, PromptForm


class PairTokenizer:
    """A token per letter, 1 for "ab", after the special token 0."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        return [0] * special_tokens + [1 if c == "#" else ord(c) for c in text.replace("ab", "#")]

    def encode_pair(self, prompt: str, continuation: str) -> tuple[list[int], int]:
        ids = self.encode(prompt + continuation)
        ends = list(itertools.accumulate(token != 0 and 1 + (token == 1) for token in ids))
        return ids, sum(end <= len(prompt) for end in ends)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], form: PromptForm = NEW_TURN) -> list[int]:
        return [len(messages), *(ord(letter) for message in messages for letter in message["content"])]


TOKENIZER = PairTokenizer()


def test_texts_are_tokenized_together_and_split_after_the_tokens_that_are_wholly_in_the_prompt() -> None:
    assert split_tokens(TOKENIZER, "x", "yab") == ((0, ord("x")), (ord("y"), 1))
    assert split_tokens(TOKENIZER, "xa", "bc") == ((0, ord("x")), (1, ord("c"))), "the pair crosses the border"
    assert split_tokens(TOKENIZER, "xa", "b") == ((0, ord("x")), (1,)), "and may be all that there is"
    assert split_tokens(TOKENIZER, "", "b") == ((0,), (ord("b"),))


def test_text_beside_token_ids_is_tokenized_alone() -> None:
    assert split_tokens(TOKENIZER, (7, 8), "ab") == ((7, 8), (1,))
    assert split_tokens(TOKENIZER, "a", (7, 8)) == ((0, ord("a")), (7, 8))
    assert split_tokens(None, (7,), (8,)) == ((7,), (8,))


@pytest.mark.parametrize(
    ("prompt", "continuation", "words"),
    [
        ((), (1,), "The prompt has no tokens"),
        ((1,), (), "The continuation has no tokens"),
        ("xa", "", "The continuation has no tokens"),
    ],
)
def test_both_need_a_token(prompt: str | tuple[int, ...], continuation: str | tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        split_tokens(TOKENIZER, prompt, continuation)


def test_text_needs_a_tokenizer() -> None:
    for prompt, continuation in (("a", (1,)), ((1,), "a")):
        with pytest.raises(InvalidRequest, match=r"has no tokenizer\.json"):
            split_tokens(None, prompt, continuation)


def test_a_request_computes_no_logits_of_the_prompt_and_one_token_less_than_it_scores() -> None:
    request = score_request((5, 6, 7), (8, 9))
    assert request.prompt == (5, 6, 7, 8)
    assert request.logprobs_from == 3
    assert request.params.max_new_tokens == 1
    assert score_request((5,), (6,)).params.prompt_logprobs is None
