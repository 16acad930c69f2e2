"""Keys of blocks: equal for equal content after equal content, and for nothing else."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from tk.infer.engine.schedule.samples.block_table import BlockKey, cache_fingerprint, next_key, root_digest
from tk.tests.infer.serve.fake_engine import INFO


def test_a_key_is_the_digest_of_the_one_before_and_the_tokens() -> None:
    tokens = np.array([7, 2**31 - 1], np.int32).tobytes()
    assert next_key(b"parent", [7, 2**31 - 1]) == BlockKey(hashlib.sha256(b"parent" + tokens).digest(), tokens)


def test_every_token_before_a_block_counts() -> None:
    root = root_digest(model="a")
    first = [next_key(root, before) for before in ((3, 4), (4, 3), (5, 4))]
    second = [next_key(before.digest, (1, 2)) for before in first]
    assert len(set(first)) == 3
    assert len(set(second)) == 3
    assert len({found.tokens for found in second}) == 1


def test_roots_differ_in_every_part() -> None:
    roots = [
        root_digest(model="a", salt=""),
        root_digest(model="a", salt="b"),
        root_digest(model="ab", salt=""),
        root_digest(model="b", salt="a"),
        root_digest(model="a", principal=""),
        root_digest(model='a", "salt": "b'),
        root_digest(model=1, salt=""),
        root_digest(model="1", salt=""),
    ]
    assert len(set(roots)) == len(roots)
    assert root_digest(salt="", model="a") == roots[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"manifest_sha256": "cd" * 32},
        {"step": 8},
        {"dtype": "bf16"},
        {"weight_dtype": "int8"},
        {"kv_dtype": "fp32"},
        {"block_size": 32},
    ],
)
def test_a_fingerprint_changes_with_all_that_the_cache_depends_on(changed: dict[str, str | int]) -> None:
    assert cache_fingerprint(replace(INFO, **changed)) != cache_fingerprint(INFO)  # type: ignore[arg-type]
