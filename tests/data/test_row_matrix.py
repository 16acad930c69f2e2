"""Row shapes x fields x kinds of files: the same tokens and mask in every kind of file, or one refusal that names all.

Each field stands in the second of two rows by itself: with a value, as null, and with a value of the wrong type. The
tables here, written by hand, say what is expected.
"""

import os
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.data.examples import ExampleEncoder
from tk.data.sources import find_corpus
from tk.tests.data.chat_templates import TEMPLATES, unmarked, with_template
from tk.tests.data.row_files import TABLES, WRITERS, can_hold, write
from tk.tests.example_counts import EVERY_EXAMPLE
from tk.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TURNS = [{"role": "user", "content": "q ☃"}, {"role": "assistant", "content": "a\n"}]
SHAPES: dict[str, dict[str, Any]] = {
    "text": {"text": "a text"},
    "prompt": {"prompt": "q", "response": "a"},
    "completion": {"prompt": "q", "completion": "a"},
    "messages": {"messages": TURNS},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "Alpaca": {"instruction": "q", "output": "a"},
    "prompt of messages": {"prompt": TURNS[:1], "completion": TURNS[1:]},
}
CHATS = frozenset({"messages", "ShareGPT", "Alpaca", "prompt of messages"})
EVERY = frozenset(SHAPES)
NONE = frozenset[str]()
# field: (a value, a value of the wrong type, shapes in which it is learned from, shapes in which it has no effect)
FIELDS: dict[str, tuple[Any, Any, frozenset[str], frozenset[str]]] = {
    "tools": ([TOOL], 3, CHATS, NONE),
    "documents": ([{"text": "d"}], "x", CHATS, NONE),
    "chat_template_kwargs": ({"style": "terse"}, ["style"], CHATS, NONE),
    "system": ("s", 3, frozenset({"ShareGPT", "Alpaca"}), NONE),
    "input": ("i", ["i"], frozenset({"Alpaca"}), NONE),
    "label": (True, "good", NONE, frozenset({"text"})),
    "stars": (3, "three", NONE, frozenset({"text"})),
    "id": ("7", 7, NONE, EVERY),
    "source": ("web", 3, NONE, EVERY),
    "parallel_tool_calls": (False, "no", NONE, NONE),
    "weight": (0, "x", NONE, NONE),
    **{
        name: (value, 3, NONE, NONE)
        for name, value in {
            "functions": [{"name": "f"}],
            "function_call": {"name": "f"},
            "chosen": "c",
            "rejected": [{"role": "assistant", "content": "r"}],
            "images": ["a.png"],
            "image": "a.png",
            "audio": "a.wav",
            "history": [["q", "a"]],
            "question": "q",
            "answer": "a",
            "name": "Ann",
            "tool_calls": [TOOL],
            "tool_call_id": "1",
            "reasoning_content": "hm",
            "thinking": "hm",
        }.items()
    },
}
# field of the assistant's message: (a value, a value of the wrong type, what becomes of the value)
MESSAGE_FIELDS: dict[str, tuple[Any, Any, str]] = {
    "weight": (0, "none", "learned"),
    "name": ("Bo", 3, "learned"),
    "tool_calls": ([TOOL], "f()", "learned"),
    "tool_call_id": ("1", 3, "learned"),
    "reasoning_content": ("hm", 3, "learned"),
    "reasoning": ("hm", ["hm"], "learned"),
    "thinking": ("hm", 3, "learned"),
    "function_call": ({"name": "f"}, "f", "refused"),
    "images": (["a.png"], 3, "refused"),
    "refusal": ("no", 3, "refused"),
    "train": (False, "no", "refused"),
    "tools": ([TOOL], 3, "refused"),
}
Outcome = str | list[tuple[list[int], list[bool]]]
KINDS = ("rows.jsonl", "rows.json", "rows.parquet", "rows.csv")


@pytest.fixture(scope="module")
def encoder(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ExampleEncoder:
    out = tmp_path_factory.mktemp("matrix") / "tokenizer"
    folder = with_template(byte_level_folder, unmarked(TEMPLATES["everything as JSON"]), out)
    return ExampleEncoder(Tokenizer.from_folder(folder), [], 0)


def outcome(encoder: ExampleEncoder, path: Path) -> Outcome:
    """Returns the tokens and mask of each row of a file, or its refusal behind the file and row."""
    try:
        documents = list(find_corpus([path]).documents())
        return [encoder.encode(each) if not isinstance(each, str) else ([], [bool(each)]) for each in documents]
    except ConfigError as error:
        said = str(error)
    assert said.startswith(str(path))
    return re.sub(r"^(?:: row |:)([12]): ", r"row \1: ", said.removeprefix(str(path)))


def in_all_kinds(encoder: ExampleEncoder, folder: Path, rows: list[dict[str, Any]]) -> Outcome:
    """Returns the one outcome of rows in every kind of file that can hold them."""
    found: dict[str, Outcome] = {}
    for name in WRITERS if os.environ.get(EVERY_EXAMPLE) else KINDS:
        columns = {key: "" for row in rows for key in row}
        held = [columns | row for row in rows] if name in TABLES else rows
        if can_hold(name, held):
            found[name] = outcome(encoder, write(folder, name, held))
    assert "rows.json" in found
    first = found["rows.json"]
    assert found == dict.fromkeys(found, first)
    return first


def judge(encoder: ExampleEncoder, folder: Path, base: dict[str, Any], changed: dict[str, Any], what: str) -> None:
    """Checks that a changed row is "learned" differently, has "no effect", or is refused with the field `what`."""
    plain = in_all_kinds(encoder, folder, [base, base])
    assert isinstance(plain, list)
    assert len(plain) == 2
    found = in_all_kinds(encoder, folder, [base, changed])
    kind, _, field = what.partition(": ")
    if kind == "no effect":
        assert found == plain
    elif kind == "learned":
        assert isinstance(found, list), found
        assert found[0] == plain[0]
        assert found[1] != plain[1]
    else:
        assert isinstance(found, str), "the field was lost"
        assert re.match(rf'row 2: (message [0-9]+: |.*)"{field}"', found), found


def cells(shapes: list[str], fields: list[str]) -> list[Any]:
    """Returns all pairs; those on diagonals, which meet every shape and every field, run in `make test`."""
    return [
        pytest.param(shape, field, marks=() if (row + column) % len(shapes) == 0 else pytest.mark.matrix)
        for row, shape in enumerate(shapes)
        for column, field in enumerate(fields)
    ]


@pytest.mark.parametrize(("shape", "field"), cells(list(SHAPES), list(FIELDS)))
def test_a_field_beside_a_shape(encoder: ExampleEncoder, tmp_path: Path, shape: str, field: str) -> None:
    value, wrong, learned, unused = FIELDS[field]
    base = SHAPES[shape]
    refused = f"refused: {field}"
    right = "learned" if shape in learned else "no effect" if shape in unused else refused
    judge(encoder, tmp_path, base, base | {field: value}, right)
    judge(encoder, tmp_path, base, base | {field: None}, "no effect")
    judge(encoder, tmp_path, base, base | {field: wrong}, "no effect" if shape in unused else refused)


@pytest.mark.parametrize(
    ("shape", "field"), cells(["messages", "ShareGPT", "prompt of messages"], list(MESSAGE_FIELDS))
)
def test_a_field_of_a_message(encoder: ExampleEncoder, tmp_path: Path, shape: str, field: str) -> None:
    value, wrong, right = MESSAGE_FIELDS[field]
    base = SHAPES[shape]
    home = "completion" if "completion" in base else next(iter(base))
    for given, what in ((value, right), (None, "no effect"), (wrong, "refused")):
        said = [*base[home][:-1], base[home][-1] | {field: given}]
        judge(encoder, tmp_path, base, base | {home: said}, f"{what}: {field}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=() if number % 4 == 0 else pytest.mark.matrix)
        for number, pair in enumerate(permutations(SHAPES, 2))
    ],
)
def test_two_shapes_in_one_row(encoder: ExampleEncoder, tmp_path: Path, first: str, second: str) -> None:
    base, other = SHAPES[first], SHAPES[second]
    nulls = base | {name: None for name in other if name not in base}
    judge(encoder, tmp_path, base, nulls, "no effect")
    found = in_all_kinds(encoder, tmp_path, [other | base, other | base])
    if set(other) <= set(base):  # the same fields with other values
        assert isinstance(found, list)
    else:
        assert isinstance(found, str)
        assert found.startswith("row 1: ")
        assert all(f'"{name}"' in found for name in (set(base) ^ set(other)) & {*base, *other} - {"prompt"})
