"""Bodies that are refused before they cost anything, and those that are read."""

import json
import time

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.serve.http.json_body import MAX_DEPTH, MAX_STRUCTURE, Fields, parse


def test_an_object_is_read_as_json_reads_it() -> None:
    value = {"prompt": 'a"b\\', "stop": ["\\", '\\"', "[{:,"], "n": 2, "é": None, "x": 0.5}
    for escaped in (True, False):
        assert parse(json.dumps(value, ensure_ascii=escaped).encode()) == value


def test_structure_inside_of_strings_and_id_lists_is_not_counted() -> None:
    assert len(parse(json.dumps({"prompt": "[" * 100_000 + '\\",' * 10_000}).encode())["prompt"]) == 130_000
    assert len(parse(json.dumps({"prompt": [7] * 100_000}).encode())["prompt"]) == 100_000
    assert parse(json.dumps({"prompt": [[7, 8], [9]]}).encode()) == {"prompt": [[7, 8], [9]]}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": ["a"] * (MAX_STRUCTURE + 1)}).encode(),
        json.dumps({"prompt": [[]] * (MAX_STRUCTURE + 1)}).encode(),
        json.dumps({"prompt": [1.5] * (MAX_STRUCTURE + 1)}).encode(),
        json.dumps({str(key): 0 for key in range(MAX_STRUCTURE)}).encode(),
        b'""' * 500_000,
        b'\\"' * 100_000 + b"," * 30_000,
    ],
    ids=["texts", "lists", "numbers", "keys", "only quotes", "escapes outside"],
)
def test_too_much_structure_is_refused_in_a_moment(body: bytes) -> None:
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match="brackets, commas and colons"):
        parse(body)
    assert time.thread_time() - begin < 0.1


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a":1}x', "not JSON"),
        (b'{"a":"\xff"}', "not JSON in UTF-8"),
        (b"[1]", "list; it must be an object"),
        (b'{"a":1,"b":2,"a":3}', "'a' twice"),
        (b'{"x":{"a":1,"a":1}}', "'a' twice"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"1.5" + b"]" * MAX_DEPTH + b"}", "nests"),
        (b"[" * 19_000, "nests"),
        (b'{"a":"\n"}', "not JSON"),
    ],
)
def test_what_is_no_object_of_json_is_refused(body: bytes, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        parse(body)


def test_a_deep_object_within_the_bound_is_read() -> None:
    depth = MAX_DEPTH - 1
    assert "a" in parse(b'{"a":' + b"[" * depth + b"1.5" + b"]" * depth + b"}")


def test_fields_are_taken_once_and_null_is_unset() -> None:
    fields = Fields({"text": "a", "number": 1, "nothing": None, "ids": [1, 2]})
    assert (fields.text("text"), fields.text("text")) == ("a", None)
    assert fields.number("number") == 1.0
    assert fields.integers("ids") == [1, 2]
    assert fields.texts("nothing") == []
    fields.refuse_rest()


def test_what_is_left_is_refused_by_its_path() -> None:
    inner = Fields({"outer": {"left": 1}}).object("outer")
    assert inner is not None
    with pytest.raises(InvalidRequest, match=r"outer\.left is unknown") as caught:
        inner.refuse_rest()
    assert caught.value.field == "outer.left"
    with pytest.raises(InvalidRequest, match="tools is not built"):
        Fields({"tools": []}).refuse_rest(frozenset({"tools"}))
