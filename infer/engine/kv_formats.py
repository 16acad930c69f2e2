"""The formats of the KV cache, by their names as `--kv-dtype`: how the keys and values of a head are stored.

Integers are those of rotated vectors: a Hadamard transform spreads outliers over all elements of a head. It is
orthogonal, so rotated queries and keys have the same scores. It is applied to every token, never folded into weights,
and turned back in the output of attention (QuaRot, arXiv 2404.00456).
"""

from dataclasses import dataclass
from typing import Final

from ...core.dtypes import COMPUTE_DTYPES, FP8_E4M3
from ...core.errors import ConfigError
from ...core.integers import ceil_div


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """How one vector, a key or a value of a head, is stored.

    Attributes:
        name: the format's name.
        bits: the bits of an element.
        scale_bytes: the bytes beside the elements of each group; 0 for floats, which have no scale.
        group: the elements of a group, of which the last may have fewer; 0: the vector is one group.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    group: int = 0

    def num_bytes(self, head_dim: int) -> int:
        """Returns the bytes of a vector of so many elements."""
        return ceil_div(head_dim * self.bits, 8) + self.num_scale_bytes(head_dim)

    def num_scale_bytes(self, head_dim: int) -> int:
        """Returns the bytes beside the elements of a vector."""
        return self.scale_bytes * (ceil_div(head_dim, self.group) if self.group else 1)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A format of the cache.

    Attributes:
        name: its name as `--kv-dtype`.
        keys, values: how a key and a value are stored.
    """

    name: str
    keys: VectorFormat
    values: VectorFormat

    @property
    def is_rotated(self) -> bool:
        """Whether keys, values and queries are rotated: integers are."""
        return self.keys.scale_bytes > 0

    @property
    def is_equalized(self) -> bool:
        """Whether the channels of keys are equalized before they are rotated (see `KeyEqualizer`)."""
        return self.keys == INT4

    @property
    def num_twins(self) -> int:
        """How many of the two have a twin, the same in int8, for attention to near and first tokens: those in int4."""
        return (self.keys == INT4) + (self.values == INT4)

    def num_bytes(self, head_dim: int) -> int:
        """Returns the bytes of the key and the value of one token and kv head, without twins."""
        return self.keys.num_bytes(head_dim) + self.values.num_bytes(head_dim)

    def twin_bytes(self, head_dim: int) -> int:
        """Returns the bytes of the twins of the key and the value of one token and kv head."""
        return self.num_twins * INT8.num_bytes(head_dim)


FP8: Final = VectorFormat("fp8", 8 * FP8_E4M3.itemsize)  # e4m3; larger values become 448
INT8: Final = VectorFormat("int8", 8, scale_bytes=4)  # symmetric, with an fp32 scale
GROUP: Final = 32
INT4: Final = VectorFormat("int4", 4, scale_bytes=4, group=GROUP)  # from a zero on, in steps of a scale, both fp16
_FLOATS: Final = tuple(VectorFormat(dtype.name, 8 * dtype.itemsize) for dtype in COMPUTE_DTYPES)
KV_FORMATS: Final = (
    *(KVFormat(each.name, each, each) for each in (*_FLOATS, FP8, INT8, INT4)),
    KVFormat("k8v4", INT8, INT4),
)
KV_DTYPES: Final = tuple(each.name for each in KV_FORMATS)


def kv_format(name: str) -> KVFormat:
    """Returns the format of that name.

    Raises:
        ConfigError: there is none.
    """
    for each in KV_FORMATS:
        if each.name == name:
            return each
    raise ConfigError(f"Unknown KV dtype {name!r}; use one of {', '.join(KV_DTYPES)}.")


def hadamard_size(head_dim: int) -> int:
    """Returns the size of the blocks in which a head is rotated: the largest power of two that divides it."""
    return head_dim & -head_dim


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

    def num_blocks(self, memory: int, num_twins: int) -> int:
        """Returns how many blocks beside the null block fit into so many bytes, with so many twins, or one for each."""
        if not self.twin:
            return memory // self.block - 1
        shared = (memory - (num_twins + 1) * self.twin) // self.block - 1
        return shared if shared > num_twins else min(memory // (self.block + self.twin) - 1, num_twins)
