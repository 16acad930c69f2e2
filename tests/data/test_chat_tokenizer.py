"""The plain chat template: what is learned, and prompts that are the beginnings of what was learned."""

import json
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.data.chat_tokenizer import write_chat_tokenizer
from tk.text.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": " What is\n2 + 2?\n"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six."},
]
TEXT = (
    "system:\nBe short.\n\nuser:\n What is\n2 + 2?\n\n\nassistant:\nFour.<|endoftext|>\n\n"
    "user:\nAnd 3 + 3?\n\nassistant:\nSix.<|endoftext|>\n\n"
)


def test_the_answers_and_their_ends_are_learned(byte_level_folder: Path, tmp_path: Path) -> None:
    write_chat_tokenizer(byte_level_folder, tmp_path / "chat")
    rendered = Tokenizer.from_folder(tmp_path / "chat").chat_template.render(MESSAGES)
    assert rendered.text == TEXT
    assert [TEXT[slice(*span)] for span in rendered.spans] == ["Four.<|endoftext|>", "Six.<|endoftext|>"]


def test_a_prompt_has_the_tokens_with_which_its_answer_was_learned(byte_level_folder: Path, tmp_path: Path) -> None:
    write_chat_tokenizer(byte_level_folder, tmp_path / "chat")
    tokenizer = Tokenizer.from_folder(tmp_path / "chat")
    prompt = tokenizer.encode_chat(MESSAGES[:4])
    learned, _ = tokenizer.encode_spans(TEXT, ())
    assert learned[: len(prompt)] == prompt
    assert tokenizer.sha256 == Tokenizer.from_folder(byte_level_folder).sha256


@pytest.mark.matrix  # transformers takes seconds to import
def test_transformers_renders_the_same(byte_level_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_chat_tokenizer(byte_level_folder, tmp_path / "chat")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "chat")
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == TEXT
    prompt = theirs.apply_chat_template(MESSAGES[:4], tokenize=False, add_generation_prompt=True)
    assert prompt == TEXT.removesuffix("Six.<|endoftext|>\n\n")


def test_a_tokenizer_that_ends_no_text_is_refused(byte_level_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    (source / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="neither a chat template nor an eos_token"):
        write_chat_tokenizer(source, tmp_path / "chat")
    assert not (tmp_path / "chat").exists()
