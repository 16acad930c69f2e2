"""What `tokenizers` raises: panics of Rust too are errors of ours, and the tokenizer stays usable."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tk.core.errors import CheckpointError, InvalidRequest
from tk.tests.text.families import TOO_MUCH, impatient
from tk.text.library_errors import failing_as
from tk.text.tokenizer import Tokenizer


def test_a_text_beyond_the_limit_of_the_regular_expression_is_the_callers_fault(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(impatient(tmp_path))
    calls = (
        lambda: tokenizer.encode(TOO_MUCH),
        lambda: tokenizer.encode_pair("", TOO_MUCH),
        lambda: tokenizer.encode_spans(TOO_MUCH, ()),
        lambda: tokenizer.encode_batch(["ab", TOO_MUCH]),
    )
    for call in calls:
        with pytest.raises(InvalidRequest, match=r"retry-limit-in-match over\. Send a shorter text") as refusal:
            call()
        assert refusal.value.field == "text"
        assert "\n" not in str(refusal.value)
    assert tokenizer.decode(tokenizer.encode("aab")) == "aab", "it works on"


def test_a_text_with_unknown_words_is_the_callers_fault(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="Missing"):
        Tokenizer.from_folder(tmp_path).encode("b")


def test_a_decoder_that_panics_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, " ": 1}, []))
    backend.decoder = decoders.Strip(" ", 0, 2)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([0]) == "a"
    with pytest.raises(CheckpointError, match=r"decoder of .*tokenizer.json cannot turn these token ids into text"):
        tokenizer.decode([1])


def test_a_file_that_makes_the_library_panic_is_refused_by_name(tmp_path: Path) -> None:
    document = {"version": "1.0", "model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ValueError("ours")])
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, failing_as(InvalidRequest):
        raise error
    assert raised.value is error
