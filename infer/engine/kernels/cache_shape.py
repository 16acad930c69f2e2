"""The KV cache of a rank in numbers: its shape, and the bytes of its blocks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of a rank.

    Attributes:
        num_blocks: the number of blocks that the scheduler allocates; one more, the null block 0, stays zero.
        block_size: the number of tokens of a block.
        dtype: the name of the cache's dtype (see `EngineOptions.kv_dtype`).
        num_twins: how many blocks can have a twin in int8, of a dtype with twins, numbered from 1: plans say which
            (`RunningPlan.twins`). 0: each block has the twin of its own number.
    """

    num_blocks: int
    block_size: int
    dtype: str
    num_twins: int = 0


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """The bytes of a block of the cache, and of its twin, over all layers of a rank; twin is 0 for a dtype without."""

    block: int
    twin: int
