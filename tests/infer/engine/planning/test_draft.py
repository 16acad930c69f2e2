"""A draft's options follow the engine's, and its tokens are the model's or it is refused."""

import json
from pathlib import Path

import pytest

from tk.core.errors import CheckpointError, ConfigError
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.draft import check_same_tokens, draft_options
from tk.text.tokenizer_files import TextFiles

TOKENIZER = {"model": {"vocab": {"a": 0}, "merges": []}, "truncation": {"max_length": 5}}


def files(name: str, tokenizer: object | None = None) -> TextFiles:
    content = {} if tokenizer is None else {"tokenizer.json": json.dumps(tokenizer, indent=2).encode()}
    return TextFiles(Path(name), content)


def test_its_options_are_those_of_one_process_beside_the_ranks() -> None:
    options = EngineOptions(Path("m"), tp=3, threads=2, kv_memory=1 << 20, kv_dtype="int4", max_running=7, dtype="bf16")
    assert draft_options(options) is None
    with_draft = EngineOptions(Path("m"), tp=3, threads=2, draft="d", speculate=2, draft_weight_dtype="int8")
    found = draft_options(with_draft)
    assert found is not None
    assert (found.checkpoint, found.tp, found.threads, found.weight_dtype) == (Path("d"), 1, 6, "int8")
    assert (found.draft, found.speculate, found.kv_dtype, found.kv_blocks) == (None, 0, "auto", 1)
    found.validate()


@pytest.mark.parametrize(
    ("of_draft", "of_model", "is_same"),
    [
        (TOKENIZER, TOKENIZER | {"truncation": None, "padding": None}, True),
        (None, None, True),
        (None, TOKENIZER, False),
        (TOKENIZER, None, False),
        (TOKENIZER, TOKENIZER | {"normalizer": {"type": "NFC"}}, False),
    ],
)
def test_the_tokenizer_must_turn_texts_into_the_same_tokens(
    of_draft: object | None, of_model: object | None, is_same: bool
) -> None:
    draft, model = files("small", of_draft), files("large", of_model)
    if is_same:
        check_same_tokens(draft, model, (9, 9))
        return
    with pytest.raises(ConfigError, match=r"tokenizer\.json of the draft small is not that of large"):
        check_same_tokens(draft, model, (9, 9))


def test_the_vocabulary_must_be_as_large() -> None:
    with pytest.raises(ConfigError, match="The draft small has a vocabulary of 9 tokens, and large one of 8"):
        check_same_tokens(files("small", TOKENIZER), files("large", TOKENIZER), (9, 8))


def test_a_tokenizer_that_is_no_json_is_named() -> None:
    broken = TextFiles(Path("small"), {"tokenizer.json": b"{"})
    with pytest.raises(CheckpointError, match=r"small/tokenizer\.json"):
        check_same_tokens(broken, files("large", TOKENIZER), (9, 9))
