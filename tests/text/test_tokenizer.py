"""Tokenizer and DetokenizerStream against `transformers`, on both families of vocabularies."""

import itertools
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tk.core.errors import CheckpointError, InvalidRequest
from tk.text.detokenizer import DetokenizerStream
from tk.text.tokenizer import Tokenizer

FAMILIES = ("byte_level", "byte_fallback")
TEXTS = st.text(max_size=40) | st.sampled_from(["", " ", "def f(x):\n    return 1\n", " a  b", "😀👩‍👩‍👧 你好"])


@pytest.fixture(scope="module")
def ours(byte_level: Tokenizer, byte_fallback: Tokenizer) -> dict[str, Tokenizer]:
    return {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(scope="module")
def theirs(byte_level_folder: Path, byte_fallback_folder: Path) -> dict[str, Any]:
    folders = {"byte_level": byte_level_folder, "byte_fallback": byte_fallback_folder}
    return {family: AutoTokenizer.from_pretrained(folder) for family, folder in folders.items()}


def streamed(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], keep: bool) -> list[str]:
    """Returns the pieces of text when `ids` are pushed in pieces that end at `cuts`."""
    stream = DetokenizerStream(tokenizer, keep)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [*(stream.push(ids[start:stop]) for start, stop in itertools.pairwise(ends)), stream.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS)
def test_encodes_as_transformers(ours: dict[str, Tokenizer], theirs: dict[str, Any], family: str, text: str) -> None:
    for special in (True, False):
        assert ours[family].encode(text, special) == theirs[family].encode(text, add_special_tokens=special)
    assert ours[family].encode_batch([text]) == [ours[family].encode(text, special_tokens=False)]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_any_ids_in_any_pieces_give_the_text_of_the_whole(
    ours: dict[str, Tokenizer], theirs: dict[str, Any], family: str, data: st.DataObject
) -> None:
    tokenizer = ours[family]
    some_bytes = st.integers(0, 300)  # the ids of special tokens and single bytes in both vocabularies
    ids = data.draw(st.lists(some_bytes | st.integers(0, tokenizer.vocab_size + 5), max_size=12))
    cuts = data.draw(st.lists(st.integers(0, 12), max_size=6))
    for keep in (False, True):
        known = [i for i in ids if i < tokenizer.vocab_size]
        expected = theirs[family].decode(known, skip_special_tokens=not keep)
        assert tokenizer.decode(ids, skip_special_tokens=not keep) == expected
        assert "".join(streamed(tokenizer, ids, cuts, keep)) == expected


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS)
def test_encoded_text_streams_back(ours: dict[str, Tokenizer], family: str, text: str) -> None:
    tokenizer = ours[family]
    ids = tokenizer.encode(text, special_tokens=False)
    pieces = streamed(tokenizer, ids, range(len(ids)), keep=True)
    for piece in pieces:
        piece.encode("utf-8")
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert spelled == (text if family == "byte_level" else " " + text if text else "")


def test_text_comes_as_soon_as_it_is_certain(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    emoji = "a☃"  # a snowman: three bytes, no token of its own
    for tokenizer in (byte_level, byte_fallback):
        ids = [next(i for i in range(300) if tokenizer.token_bytes(i) == bytes([byte])) for byte in emoji.encode()]
        stream = DetokenizerStream(tokenizer)
        if tokenizer is byte_level:
            assert [stream.push([i]) for i in ids] == ["a", "", "", "☃"]
            assert stream.flush() == ""
        else:  # a later byte could still make the run invalid
            assert "".join(stream.push([i]) for i in ids) == ""
            assert stream.push(tokenizer.encode("x", special_tokens=False)) == "a☃ x"


def test_the_final_part_of_a_long_push_is_returned_at_once(byte_level: Tokenizer) -> None:
    half = byte_level.encode("☃", special_tokens=False)[:1]
    stream = DetokenizerStream(byte_level)
    assert stream.push([*byte_level.encode("def f"), *half]) == "def f"
    assert stream.flush() == "\ufffd"


def test_token_bytes(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer in (byte_level, byte_fallback):
        assert tokenizer.longest_token_bytes == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    assert byte_level.token_bytes(0) == b"<|endoftext|>"
    assert byte_level.token_bytes(byte_level.vocab_size) == b""
    assert {byte_level.token_bytes(i) for i in range(1, 257)} == {bytes([byte]) for byte in range(256)}
    assert [byte_fallback.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert byte_fallback.token_bytes(byte_fallback.encode(" ")[-1])[:1] == b" "
    assert byte_fallback.token_bytes(2) == b"</s>"


def test_special_tokens_outside_ascii_stream_as_the_decoder_has_them(byte_level_folder: Path, tmp_path: Path) -> None:
    document = json.loads((byte_level_folder / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": 1000, "content": "<é"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.from_folder(tmp_path)
    snowman = tokenizer.encode("☃")
    ids = [1000, *snowman, 1000, *snowman[1:], 5]
    assert tokenizer.token_bytes(1000) == "<é".encode()
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(streamed(tokenizer, ids, range(len(ids)), keep=True)) == whole


def test_other_threads_run_while_a_long_text_is_encoded(byte_level: Tokenizer) -> None:
    long_text = "def main(argument):\n    return argument + 123\n" * 2000
    turns, encoded = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not encoded.wait(0.001):
            turns += 1

    for encode in (byte_level.encode, lambda text: byte_level.encode_spans(text, ())):
        encoded.clear()
        counter = threading.Thread(target=count)
        counter.start()
        before = turns
        encode(long_text)
        seen = turns - before
        encoded.set()
        counter.join()
        assert seen >= 5, "threads that wait for the interpreter's lock get one turn, when it is over"


def test_lone_surrogates_are_the_callers_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("\ud800")


def test_end_ids(byte_level_folder: Path, byte_fallback: Tokenizer, tmp_path: Path) -> None:
    assert byte_fallback.eos_token_id == 2
    assert byte_fallback.eos_token_ids == {2}, "without any config, the tokenizer's own"
    shutil.copytree(byte_level_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == {7, 8, 9}
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", '{"eos_token": "<nowhere>"}'),
        ("tokenizer_config.json", "[]"),
        ("config.json", '{"eos_token_id": "0"}'),
        ("config.json", '{"eos_token_id": [true]}'),
        ("generation_config.json", "{"),
    ],
)
def test_damaged_folders_are_refused_by_name(
    byte_level_folder: Path, tmp_path: Path, name: str, content: str | bytes | None
) -> None:
    shutil.copytree(byte_level_folder, tmp_path, dirs_exist_ok=True)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointError) as refusal:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path / name) in str(refusal.value)
