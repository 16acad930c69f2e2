"""Headers of safetensors files: those that are accepted, and the layout of ours."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.format.safetensors_file import build_header, read_header
from tk.core.errors import CheckpointError

Document = dict[str, Any]


def header(document: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int = 0, end: int = 4, dtype: str = "F32", shape: object = (1,)) -> Document:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x01", "8 at least"),
        (header({}, length=2**63), "claims 9223372036854775808 bytes"),
        (header({}, length=3), "claims 3 bytes"),
        (header(b"[]"), "not a JSON object"),
        (header(b'{"a":1,"a":1}'), "twice"),
        (header({"a": entry()}), "describes 4 bytes of data; the file has 0"),
        (header({"a": entry()}, b"12345"), "the file has 5"),
        (header({"a": entry(), "b": entry()}, b"1234"), "overlaps the one before"),
        (header({"a": entry(4, 8)}, b"12345678"), "leaves a hole"),
        (header({"a": entry(shape=(2,))}, b"1234"), "takes 8 bytes"),
        (header({"a": entry(shape=(2**31, 2**31, 2**31))}, b"1234"), "takes"),
        (header({"a": entry(shape=(1,) * 9)}, b"1234"), "9 dims"),
        (header({"a": entry(shape=(-1, -1))}, b"1234"), "shape must be an integer"),
        (header({"a": entry(dtype="OBJECT")}, b"1234"), "has the unknown dtype 'OBJECT'"),
        (header({"a": entry() | {"code": "x"}}, b"1234"), "unknown key 'code'"),
        (header({"a": {"dtype": "F32"}}, b"1234"), "lacks 'shape'"),
        (header({"__metadata__": {"x": 1}}), "strings to strings"),
        (header({"a\x00b": entry()}, b"1234"), "printable"),
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("marked", [True, False])
def test_a_header_that_we_build_is_read_back(tmp_path: Path, marked: bool) -> None:
    rows = [("a", "F32", (3, 2)), ("b@exp_avg#0", "BF16", (5,)), ("empty", "F32", (0, 4))]
    head, placed = build_header(rows, marked)
    path = tmp_path / "model.safetensors"
    path.write_bytes(head + bytes(24 + 10))
    found = read_header(path)
    assert list(found.entries.values()) == placed
    assert [(place.begin - len(head), place.end - len(head)) for place in placed] == [(0, 24), (24, 34), (34, 34)]
    assert found.data_start == len(head) == 4096
    assert found.size == path.stat().st_size
    assert found.sha256 == hashlib.sha256(head).hexdigest()
    assert found.metadata == {"format": "pt"} | ({"tk": "1"} if marked else {})
