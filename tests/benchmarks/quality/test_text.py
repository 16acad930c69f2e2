"""The text of bench_quality.py, and the windows of it."""

import json
from pathlib import Path

from tk.benchmarks.quality.text import windows_of, write_text
from tk.tests.infer.serve.tiny_model import write_tiny_model
from tk.text.tokenizer import Tokenizer


def test_two_texts_of_the_given_lengths_are_written(tmp_path: Path) -> None:
    prose, code = write_text(tmp_path / "text.jsonl", 300, 200)
    assert (len(prose), len(code)) == (300, 200)
    assert prose.startswith('The "assert" statement')
    assert code.startswith("# Author: Steven J. Bethard")
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": prose}, {"text": code}]


def test_windows_overlap_by_the_token_that_is_not_scored(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_model(tmp_path))
    first, second = tokenizer.encode("abcdefgh"), tokenizer.encode("xyz")
    windows = windows_of(["abcdefgh", "xyz"], tokenizer, 4)
    assert windows == [first[0:4], first[3:7], first[6:8], second]
    assert sum(len(window) - 1 for window in windows) == len(first) - 1 + len(second) - 1
