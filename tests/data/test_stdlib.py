"""The standard library's corpus: it is made within the demo's time, it is used again, and damage is reported."""

import time
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.data.dataset import PackedDataset
from tk.data.stdlib import prepare_stdlib
from tk.data.token_file import TokenFile
from tk.data.unigram import unigram_entropy
from tk.text.tokenizer import Tokenizer


@pytest.mark.matrix  # cli/test_demo.py prepares a part of it
def test_prepare_stdlib(tmp_path: Path) -> None:
    phases: dict[str, tuple[int, int]] = {}
    start = time.process_time()  # all threads of this process, so that other load on the machine does not count
    prepared = prepare_stdlib(tmp_path, 2048, lambda phase, done, total: phases.update({phase: (done, total)}))
    assert time.process_time() - start < 25, "the demo's share for data; about 6 s of CPU, 5 s on 2 cores"
    assert list(phases) == ["tokenizer", "tokens"]
    assert all(done == total > 4e6 for done, total in phases.values())

    meta = TokenFile(prepared.tokens).meta
    assert meta.vocab_size == Tokenizer.from_folder(prepared.tokenizer).vocab_size == 2048
    assert meta.num_tokens > 1e6
    held_out = PackedDataset([(prepared.tokens, 1.0)], 256, 0, "eval")
    assert 5.0 < unigram_entropy(held_out) < 7.0, "nats: between trivial text and noise (log 2048 = 7.6)"

    phases.clear()
    assert prepare_stdlib(tmp_path, 2048) == prepared
    assert phases == {}, "the cache is used"
    tokens = bytearray((prepared.tokens / "tokens.bin").read_bytes())
    tokens[1000] ^= 1
    (prepared.tokens / "tokens.bin").write_bytes(tokens)
    with pytest.raises(ConfigError, match=r"tokens\.bin is damaged.*can be deleted"):
        prepare_stdlib(tmp_path, 2048)
