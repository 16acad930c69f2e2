"""The arguments of `generate` in all their forms, and the prompts that are refused by name."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tk.core.errors import InvalidRequest, PromptTooLong
from tk.infer.engine.request.prompts import (
    Conversation,
    as_params,
    as_prompt,
    as_prompts,
    check_length,
    is_one_prompt,
    prompt_tokens,
)
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.text.chat_context import NEW_TURN, PromptForm


class Letters:
    """An encoder that gives each letter its code; 0 is its special token."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        return [0] * special_tokens + [ord(letter) for letter in text]

    def encode_pair(self, prompt: str, continuation: str) -> tuple[list[int], int]:
        return self.encode(prompt + continuation), 1 + len(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], form: PromptForm = NEW_TURN) -> list[int]:
        return [len(messages), *(ord(letter) for message in messages for letter in message["content"])]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        ([5, 6], [(5, 6)]),
        (np.array([5, 6]), [(5, 6)]),
        (range(2), [(0, 1)]),
        (array("i", [7]), [(7,)]),
        (["ab", [5, 6], ""], ["ab", (5, 6), ""]),
        ([[5], []], [(5,), ()]),
        ([], []),
    ],
)
def test_a_text_or_a_flat_list_is_one_prompt(given: Any, prompts: list[Any]) -> None:
    assert as_prompts(given) == prompts
    assert is_one_prompt(given) == (prompts not in ([], ["ab", (5, 6), ""], [(5,), ()]))
    for prompt in prompts:
        assert isinstance(prompt, str) or all(type(token) is int for token in prompt)


@pytest.mark.parametrize("given", [[True], [5, False], [5, "ab"], [5, 2.5]])
def test_truth_values_texts_and_fractions_are_no_token_ids(given: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"A prompt is list .* it must be a str, a list of token ids or"):
        as_prompts(given)


@pytest.mark.parametrize("given", [7, None, b"ab", {"a": 1}, 2.5])
def test_other_things_are_no_prompts(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"prompts is {type(given).__name__} ") as refused:
        as_prompts(given)
    assert refused.value.field == "prompt"
    with pytest.raises(InvalidRequest, match=r"it must be a str, a list of token ids or a Conversation"):
        as_prompt(given)


def test_a_list_in_which_something_is_no_token_is_shown_up_to_a_limit() -> None:
    with pytest.raises(InvalidRequest, match=r"A prompt is list \[5, 'x'\];"):
        as_prompt([5, "x"])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest) as refused:
        as_prompt([*range(1000), 0.5])  # type: ignore[list-item]
    assert len(str(refused.value)) < 150


def test_options_are_for_all_prompts_or_one_for_each() -> None:
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    assert as_params(None, 2) == [SamplingParams()] * 2
    assert as_params(one, 3) == [one] * 3
    assert as_params([one, two], 2) == [one, two]
    with pytest.raises(InvalidRequest, match="2 SamplingParams for 3 prompts"):
        as_params((one, two), 3)


def test_a_prompt_leaves_room_for_a_token() -> None:
    check_length(1, 8)
    check_length(7, 8)
    with pytest.raises(InvalidRequest, match="has no tokens"):
        check_length(0, 8)
    with pytest.raises(PromptTooLong, match="at most 7") as refused:
        check_length(8, 8)
    assert refused.value.field == "prompt"


def test_a_text_is_encoded_and_ids_stay() -> None:
    assert prompt_tokens(Letters(), "ab") == (0, 97, 98)
    assert prompt_tokens(Letters(), "ab", special_tokens=False) == (97, 98)
    assert prompt_tokens(Letters(), (5, 6)) == prompt_tokens(None, (5, 6)) == (5, 6)
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        prompt_tokens(None, "ab")


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None], [{}], 3])
def test_params_are_one_or_a_list(params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^params is .*; it must be one SamplingParams, or a list of these"):
        as_params(params, 1)
    assert as_params([SamplingParams(n=2)], 1) == [SamplingParams(n=2)]


def test_a_conversation_is_one_prompt() -> None:
    talk = Conversation([{"role": "user", "content": "ab"}])
    mixed: list[Any] = [talk, "a"]
    assert (as_prompt(talk), as_prompts(talk), as_prompts(mixed)) == (talk, [talk], mixed)
    assert prompt_tokens(Letters(), talk) == (1, ord("a"), ord("b"))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "user", "content": "a"}] * 1025, "messages"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "messages[1]"),
        ([{"role": "user", "content": 5}], "messages[0]"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0]"),
    ],
)
def test_messages_that_cannot_be_sent_are_refused(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Conversation(messages)
    assert refused.value.field == field
