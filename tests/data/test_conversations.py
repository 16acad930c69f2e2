"""Tools and their calls, reasoning, documents and weights of conversations, as `transformers` renders them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from tk.core.errors import ConfigError
from tk.data.examples import Chat, ExampleEncoder
from tk.data.row_shapes import RowReader
from tk.tests.data.chat_templates import TEMPLATES, marked, skipping, unmarked, with_template
from tk.text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "<ü> & 'x'", "parameters": {"type": "object", "default": None}},
    },
    {"type": "function", "function": {"name": "time", "parameters": {}}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": None}}}
TEXT_CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
ASKED = {"role": "user", "content": " Rain?\n"}


def said(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "system", "content": "s"}, ASKED, said("No."), ASKED, said("Yes ☃")],
    "calls": [ASKED, said(None, tool_calls=[CALL]), {"role": "tool", "name": "weather", "content": "dry"}, said("No.")],
    "call as text": [ASKED, said("", tool_calls=[TEXT_CALL]), {"role": "tool", "content": "3"}, said("No.")],
    "reasoning": [ASKED, said("No.", reasoning_content="clouds"), ASKED, said("Yes", thinking="sun"), ASKED, said("a")],
    "names": [ASKED | {"name": "Ann"}, said("No.", reasoning="hm")],
}
PARTS = {"calls": "tool_calls", "call as text": "tool_calls", "reasoning": "reasoning_content", "names": "reasoning"}
# What each template has a place for; of the rest, tk must refuse the row where `transformers` loses it.
PLACES = {
    "ChatML with tools": {"tools", "tool_calls", "reasoning_content", "reasoning"},
    "Llama 3": {"tools", "tool_calls"},
    "SmolLM2": set[str](),
    "everything as JSON": {"tools", "tool_calls", "reasoning_content", "reasoning", "documents", "style"},
}


@pytest.fixture(scope="module")
def chat_folder(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte-level tokenizer's folder, with special tokens for turns."""
    folder = tmp_path_factory.mktemp("chat") / "tokenizer"
    shutil.copytree(byte_level_folder, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|start|>"}))
    return folder


@pytest.fixture(scope="module")
def theirs(chat_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(chat_folder)


def expected(theirs: Any, source: str, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Returns the tokens and the mask of `transformers`; a message of weight 0 is one to skip."""
    messages = [
        {
            ("skip" if key == "weight" else key): (value == 0 if key == "weight" else value)
            for key, value in each.items()
        }
        for each in row["messages"]
    ]
    found = theirs.apply_chat_template(
        messages,
        tools=row.get("tools"),
        documents=row.get("documents"),
        chat_template=skipping(source),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **row.get("chat_template_kwargs", {}),
    )
    return found["input_ids"], found["assistant_masks"]


def ours(folder: Path, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    chat = RowReader().read(row, "x.json: row 1")
    assert isinstance(chat, Chat)
    ids, learned = ExampleEncoder(Tokenizer.from_folder(folder), [], 0).encode(chat)
    return ids, [int(each) for each in learned]


@pytest.mark.parametrize("with_tools", [False, True], ids=["without tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(
    chat_folder: Path, theirs: Any, tmp_path: Path, name: str, with_tools: bool
) -> None:
    source = TEMPLATES[name]
    folders = [with_template(chat_folder, form(source), tmp_path / form.__name__) for form in (marked, unmarked)]
    for kind, messages in CONVERSATIONS.items():
        row = {"messages": messages} | ({"tools": TOOLS} if with_tools else {})
        needed = {PARTS[kind]} if kind in PARTS else set()
        missing = (needed | ({"tools"} if with_tools else set())) - PLACES[name]
        for folder in folders:
            if missing:
                with pytest.raises(ConfigError, match=r"x\.json: row 1: .*(no place for|refuses these messages)"):
                    ours(folder, row)
            else:
                assert ours(folder, row) == expected(theirs, source, row), (kind, folder.name)


@pytest.mark.parametrize("name", ["ChatML with tools", "Llama 3", "SmolLM2"])
def test_a_message_of_weight_0_is_read_and_not_learned(
    chat_folder: Path, theirs: Any, tmp_path: Path, name: str
) -> None:
    source = TEMPLATES[name]
    folders = [with_template(chat_folder, form(source), tmp_path / form.__name__) for form in (marked, unmarked)]
    turns = [ASKED, said("one"), ASKED, said("two"), ASKED, said("three")]
    for weights in ((0, 1, 1), (1, 0, None), (0, 0, 1), (1, 1, 0)):
        given = iter(weights)
        messages = [turn | ({"weight": next(given)} if turn["role"] == "assistant" else {}) for turn in turns]
        for folder in folders:
            assert ours(folder, {"messages": messages}) == expected(theirs, source, {"messages": messages}), weights


def test_documents_and_variables_reach_the_template(chat_folder: Path, theirs: Any, tmp_path: Path) -> None:
    source = TEMPLATES["everything as JSON"]
    folder = with_template(chat_folder, unmarked(source), tmp_path / "all")
    row: dict[str, Any] = {"messages": CONVERSATIONS["plain"], "documents": [{"title": "t", "text": "d"}]}
    row["chat_template_kwargs"] = {"style": "terse"}
    assert ours(folder, row) == expected(theirs, source, row)
    plain = with_template(chat_folder, unmarked(TEMPLATES["SmolLM2"]), tmp_path / "plain")
    for name in ("documents", "chat_template_kwargs"):
        with pytest.raises(ConfigError, match=r'no place for "(documents|style)"'):
            ours(plain, {"messages": row["messages"], name: row[name]})


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_a_template_for_tools_is_taken_with_tools(chat_folder: Path, tmp_path: Path, place: str) -> None:
    default, tool_use = (unmarked(TEMPLATES[name]) for name in ("SmolLM2", "ChatML with tools"))
    folder = tmp_path / "tokenizer"
    shutil.copytree(chat_folder, folder)
    if place == "tokenizer_config.json":
        config = json.loads((folder / place).read_text())
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
        (folder / place).write_text(json.dumps(config | {"chat_template": named}))
    else:
        (folder / "chat_template.jinja").write_text(default)
        (folder / place).mkdir()
        (folder / place / "tool_use.jinja").write_text(tool_use)
    theirs = AutoTokenizer.from_pretrained(folder)
    for tools in (None, [], TOOLS):
        messages = CONVERSATIONS["plain"]
        ids = theirs.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
        assert ours(folder, {"messages": messages, "tools": tools})[0] == ids


def test_turns_that_cannot_be_told_apart_refuse_a_weight(chat_folder: Path, tmp_path: Path) -> None:
    source = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    folder = with_template(chat_folder, source, tmp_path / "one")
    row = {"messages": [ASKED, said("one", weight=0), ASKED, said("two")]}
    with pytest.raises(ConfigError, match=r"row 1: .*does not mark the assistant's messages one by one"):
        ours(folder, row)
