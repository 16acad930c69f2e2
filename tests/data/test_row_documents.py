"""Rows of each shape as documents: other forms of a conversation are the conversation that they stand for."""

import json
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.data.examples import Chat, PromptResponse
from tk.data.row_shapes import RowReader

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def read(row: dict[str, Any]) -> Any:
    return RowReader().read(row, "x.json: row 1")


def test_prompts_and_responses() -> None:
    assert read({"prompt": "q", "response": "a"}) == PromptResponse("q", "a")
    assert read({"prompt": "q", "completion": "", "response": None}) == PromptResponse("q", "")
    assert read({"prompt": "", "response": ""}) is None, "a row of empty cells"
    assert read({"text": "t"}) == "t"
    assert read({"text": ""}) is None


@pytest.mark.parametrize(
    ("row", "system"),
    [
        ({"instruction": "q", "output": "a"}, ""),
        ({"instruction": "q", "output": "a", "input": "", "system": "s"}, "s"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": ""}, ""),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}, "s"),
        ({"conversations": TURNS}, ""),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, ""),
    ],
)
def test_conversations_in_other_forms(row: dict[str, Any], system: str) -> None:
    messages = [*([{"role": "system", "content": system}] if system else []), *TURNS]
    assert read(row | {"tools": TOOLS}) == read({"messages": messages, "tools": TOOLS})


def test_an_alpaca_input_is_a_line_of_its_own() -> None:
    assert read({"instruction": "q", "input": "i", "output": "a"}).messages[0]["content"] == "q\ni"


def test_only_the_completion_of_messages_is_learned() -> None:
    found = read({"prompt": [*TURNS, TURNS[0]], "completion": [TURNS[1], TURNS[0], TURNS[1] | {"weight": 0}]})
    assert isinstance(found, Chat)
    assert (len(found.messages), sorted(found.unlearned)) == (6, [1, 5])


def test_what_goes_beside_messages() -> None:
    row = {"messages": TURNS, "documents": [{"text": "d"}], "chat_template_kwargs": {"enable_thinking": False}}
    for tools in (TOOLS, json.dumps(TOOLS)):
        context = read(row | {"tools": tools}).context
        assert (context.tools, context.documents, context.variables) == (
            TOOLS,
            [{"text": "d"}],
            {"enable_thinking": False},
        )
    assert read({"messages": TURNS, "tools": []}).context.tools == []
    assert read({"messages": TURNS, "tools": ""}).context.tools is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "response": "a", "completion": "b"}, 'both "response" and "completion"'),
        ({"prompt": TURNS, "response": "a"}, '"prompt" must be a string, but it is list'),
        ({"prompt": "q", "response": "a", "tools": TOOLS}, '"tools" goes through a chat template'),
        ({"instruction": "q"}, '"output" must be a string, but it is missing'),
        ({"instruction": "q", "output": "a", "input": 3}, '"input" must be a string'),
        ({"instruction": "q", "output": "a", "system": 3}, '"system" must be a string, but it is int'),
        ({"conversations": [{"from": "system", "value": "s"}], "system": "t"}, '"system" and a system message too'),
        ({"messages": TURNS, "tools": "{"}, '"tools" is a string that is not valid JSON'),
        ({"messages": TURNS, "tools": {"f": 1}}, '"tools" must be a list of objects'),
        ({"messages": TURNS, "documents": ["d"]}, '"documents" must be a list of objects'),
        ({"messages": TURNS, "chat_template_kwargs": "x"}, '"chat_template_kwargs" must be an object'),
        ({"messages": TURNS, "chat_template_kwargs": {"messages": []}}, 'cannot have "messages"'),
    ],
)
def test_a_wrong_value_is_named(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(row)
    assert str(refusal.value).startswith("x.json: row 1: ")
    assert said in str(refusal.value)
