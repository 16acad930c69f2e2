"""JSON from a stranger: the documents that are refused, and the messages."""

import pytest

from tk.checkpoint.format import json_strict as strict
from tk.core.errors import ManifestError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":1,"a":2}', "'a' twice"),
        (b"[       " * 20_000, "nested deeper"),
        (b"[" + b"0," * 50_000 + b"0]", "holds 50001 values in 100003 bytes; at least 3 bytes each are required"),
        (b"[" + b'"ab",' * 50_000 + b"0]", "holds 50000 strings in 250003 bytes; at least 8 bytes each are required"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested deeper than 32"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":1e999}', "beyond the range"),
        (b'{"a":' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"a":\xff}', "not UTF-8"),
        (b'{"a":1', "is not JSON"),
        (b"", "is not JSON"),
        (b"[" + b"1," * 50 + b"1]", "more than 50 values"),
    ],
)
def test_hostile_json(text: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        strict.parse(text, "the file", max_nodes=50 if b"1,1" in text else strict.MAX_NODES)
