"""The keys of full KV cache blocks: one digest of a block's tokens and of all tokens before them.

A block's keys and values are a function of the model and of all tokens up to the block's last one. The digest is
chained: SHA-256 of the digest of the block before and of the block's own tokens. The first block's chain begins with a
root, which names everything else that must be the same. The tokens are part of a key too, and are compared.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from ...request.events import ModelInfo


class BlockKey(NamedTuple):
    """The content of a full block.

    Attributes:
        digest: the SHA-256 of the block and all before it.
        tokens: its token ids, int32.
    """

    digest: bytes
    tokens: bytes


def cache_fingerprint(info: ModelInfo) -> str:
    """Returns a text that differs between models whose blocks hold different keys and values for the same tokens."""
    return json.dumps([info.manifest_sha256, info.step, info.dtype, info.weight_dtype, info.kv_dtype, info.block_size])


def root_digest(**parts: str | int) -> bytes:
    """Returns the root of chains whose blocks may be shared: different names or values give different roots."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def next_key(parent: bytes, tokens: Iterable[int]) -> BlockKey:
    """Returns the key of the block with these tokens, which follows the block, or the root, with digest `parent`."""
    data = array("i", tokens).tobytes()
    return BlockKey(hashlib.sha256(parent + data).digest(), data)
