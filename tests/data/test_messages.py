"""Messages of conversations: what reaches the chat template, and what is refused by name."""

from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.data.messages import read_messages

ASKED = {"role": "user", "content": "a"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]


def read(*messages: Any, name: str = "messages", ignored: tuple[str, ...] = ()) -> Any:
    return read_messages(list(messages), name, "rows.json: row 7", ignored)


def test_fields_reach_the_template_and_weights_do_not() -> None:
    messages = [
        ASKED | {"name": "Ann", "weight": 0},
        {"role": "assistant", "content": None, "tool_calls": CALLS, "weight": 1, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "3", "tool_calls": None},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "th"}, {"type": "text", "text": "ree"}],
            "weight": 0,
        },
        {"role": "assistant", "content": "", "weight": 0.0, "id": 5, "refusal": None, "annotations": []},
    ]
    found = read(*messages)
    assert found.unlearned == {3, 4}
    assert found.given == (
        ASKED | {"name": "Ann"},
        {"role": "assistant", "tool_calls": CALLS, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "3"},
        {"role": "assistant", "content": "three"},
        {"role": "assistant", "content": "", "id": 5, "annotations": []},
    )


def test_sharegpt_is_the_same_conversation() -> None:
    turns = [("system", "s"), ("human", "a"), ("gpt", "b"), ("user", "c"), ("assistant", "d")]
    found = read(*({"from": speaker, "value": text} for speaker, text in turns), name="conversations")
    assert [(each["role"], each["content"]) for each in found.given] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ]
    mixed = read({"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}, name="conversations")
    assert (mixed.unlearned, mixed.given[1]) == ({1}, {"role": "assistant", "content": "b"})
    assert read(ASKED, name="conversations").given == (ASKED,)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("x", 'must be an object with a string "role"'),
        ({"content": "x"}, 'must be an object with a string "role"'),
        ({"role": ""}, 'must be an object with a string "role"'),
        ({"role": "user"}, '(user) has no "content"'),
        ({"role": "user", "content": 3}, '"content" must be a string'),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "or a list of parts of text"),
        ({"role": "user", "content": ["x"]}, "or a list of parts of text"),
        ({"role": "user", "content": "x", "weight": 1}, 'has "weight": 1, but only the assistant'),
        ({"role": "assistant", "content": "x", "weight": 0.5}, '"weight" must be 0'),
        ({"role": "assistant", "content": "x", "weight": True}, '"weight" must be 0'),
        ({"role": "assistant", "content": "x", "weight": "0"}, '"weight" must be 0'),
        ({"role": "assistant", "content": "x", "tool_calls": "f(x)"}, '"tool_calls" must be a list of objects'),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, '"function_call" is the old name'),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, '"audio" holds more than text'),
        ({"role": "assistant", "content": "x", "refusal": "no"}, '"refusal" is not learned'),
        ({"role": "assistant", "content": "x", "train": False}, '"train" is no field of a message that tk knows'),
        ({"role": "tool", "content": "x", "name": 3}, '"name" must be a string'),
        ({"from": "human", "value": "x"}, 'must be an object with a string "role"'),
    ],
)
def test_a_wrong_message_is_named(message: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(ASKED, message)
    assert str(refusal.value).startswith("rows.json: row 7: message 2")
    assert said in str(refusal.value)


def test_fields_to_ignore_are_absent() -> None:
    found = read(
        ASKED | {"train": False}, {"role": "assistant", "content": "x", "weight": 0}, ignored=("train", "weight")
    )
    assert (found.given[0], found.unlearned) == (ASKED, frozenset())


@pytest.mark.parametrize("speaker", ["observation", "function_call", "tool", "GPT"])
def test_an_unknown_speaker_is_named(speaker: str) -> None:
    with pytest.raises(ConfigError, match=rf'message 1 has "from": \'{speaker}\', which is none of system, human'):
        read({"from": speaker, "value": "x"}, name="conversations")
