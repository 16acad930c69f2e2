"""Tokenizer training: the same text gives the same files, which `transformers` can read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tk.core.errors import ConfigError
from tk.data.tokenizer_training import END_OF_TEXT, train_byte_level_bpe
from tk.text.tokenizer import Tokenizer

TRAIN = """
import sys
from pathlib import Path
from tk.data.tokenizer_training import train_byte_level_bpe
train_byte_level_bpe(Path(sys.argv[1]).read_text().split("\\0"), 600, Path(sys.argv[2]))
"""


def test_files_are_the_same_in_every_process(documents: list[str], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.write_text("\0".join(documents[:10]))
    for seed, threads in (("1", "1"), ("2", "2")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", TRAIN, str(corpus), str(tmp_path / seed)]
        subprocess.run(command, check=True, env=environment, timeout=60)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_transformers_knows_the_end_of_text(byte_level_folder: Path, byte_level: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(byte_level_folder)
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (END_OF_TEXT, 0, 1000)
    assert (byte_level.eos_token_id, byte_level.vocab_size) == (0, 1000)


def test_a_poor_corpus_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    tokenizer = train_byte_level_bpe(["ab ab"], 5000, tmp_path / "poor")
    assert tokenizer.vocab_size == 257 + len(["ab", "Ġab"])
    assert tokenizer.decode(tokenizer.encode("日本 ab\n")) == "日本 ab\n"


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    def fails() -> object:
        yield "some text"
        raise ConfigError("bad line")

    with pytest.raises(ConfigError, match="257 or more"):
        train_byte_level_bpe(["text"], 256, tmp_path / "small")
    with pytest.raises(ConfigError, match="no text"):
        train_byte_level_bpe(["", ""], 300, tmp_path / "empty")
    with pytest.raises(ConfigError, match="bad line"):
        train_byte_level_bpe(fails(), 300, tmp_path / "failed")  # type: ignore[arg-type]  # a generator is an Iterable
    assert list(tmp_path.iterdir()) == []
