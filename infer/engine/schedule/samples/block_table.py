"""The KV cache blocks of one sample, and the keys of full ones: a digest of a block's tokens and of all before them.

A block's keys and values are a function of the model and of all tokens up to the block's last one. The digest is
chained: SHA-256 of the digest of the block before and of the block's own tokens. The first block's chain begins with a
root, which names everything else that must be the same. The tokens are part of a key too, and are compared.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sample, which `BlockManager` gives and takes.

    Attributes:
        root: the root of the chain of its blocks' keys; only samples with equal roots share blocks.
        is_private: whether no other request has this root, so that blocks are useless after the end.
        max_reused: how many leading tokens need not be computed if the cache has them; the logits of others are wanted.
        prompt_keys: the keys of the prompt's full blocks, which all samples of a request share; made when first needed.
        output_keys: the keys of the full blocks that end in the output.
        blocks: the blocks; token i lies in blocks[i // block_size].
        num_published: the number of leading blocks that were published under their keys.
        first_twin: the index of the first block but 0 that may have a twin.
        stop_twin: the index after the last block that may have one.
        twins: blocks and their new twins, in turn, that workers do not know of yet.
        shares_last: whether others hold or may find the block of the prompt's last token, which is not full.
        fork: the place of a block that it shared, that block, and its own instead, until workers know of it; or None.
    """

    root: bytes = b""
    is_private: bool = False
    max_reused: int = sys.maxsize
    prompt_keys: list[BlockKey] = field(default_factory=list)
    output_keys: list[BlockKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    first_twin: int = 1
    stop_twin: int = 0
    twins: list[int] = field(default_factory=list)
    shares_last: bool = False
    fork: tuple[int, int, int] | None = None


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
