"""The amount and kind of a corpus's content: exact for a small corpus, from its beginning for a large one."""

import gzip
import json
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.data.corpus_facts import CorpusFacts, corpus_facts
from tk.data.sources import find_corpus

CHAT = {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "bc"}]}


def test_texts_count_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 10)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"b" * 1000))
    assert corpus_facts(find_corpus([tmp_path])) == CorpusFacts(1020, 2, examples=False, chats=False)


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"text": "abc"}, CorpusFacts(3, 1, examples=False, chats=False)),
        ({"prompt": "ab", "response": "c"}, CorpusFacts(3, 1, examples=True, chats=False)),
        (CHAT, CorpusFacts(5, 1, examples=True, chats=True)),
    ],
)
def test_rows_say_of_which_kind_they_are(row: object, facts: CorpusFacts, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert corpus_facts(find_corpus([tmp_path])) == facts


def test_a_large_corpus_is_taken_to_be_like_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "a" * 80}) + "\n") * 40_000)
    found = corpus_facts(find_corpus([tmp_path]), most=1 << 20)
    assert found.num_bytes == pytest.approx(80 * 40_000, rel=0.1)
    assert found.num_documents == pytest.approx(40_000, rel=0.1)


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match="no text to train on"):
        corpus_facts(find_corpus([tmp_path]))
