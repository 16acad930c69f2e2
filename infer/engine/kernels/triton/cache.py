"""The pages of a rank's cache as kernels take them: those of the ATen backend, in its layout.

A page holds the keys or values of one block and kv head, [block_size, E], one vector after the other. A vector's place
is its line, (block * kv heads + head) * block_size + offset.
"""

from typing import Any, NamedTuple

import torch

from ..aten.kv_cache import KVCache


class PageParts(NamedTuple):
    """The tensors of a layer's keys, values or twins, see `aten/pages.py`; kernels see their pointers.

    Attributes:
        data: the elements, [blocks, kv heads, block_size, E], of 4 bits two in a byte.
        scales: fp32 [blocks, kv heads, block_size] of int8, fp16 [blocks, kv heads, block_size, groups] of 4 bits.
        zeros: fp16, as scales, of 4 bits.
    """

    data: Any
    scales: Any = None
    zeros: Any = None


class LayerPages(NamedTuple):
    """A layer's pages; kernels see them as they are here.

    Attributes:
        key_pages, value_pages: the pages ("values" is taken in Triton).
        key_twins, value_twins: their twins; without, parts that are None.
        twin_of: the twin of each block, 0 for none: int64 [blocks].
    """

    key_pages: Any
    value_pages: Any
    key_twins: Any
    value_twins: Any
    twin_of: Any

    @classmethod
    def of(cls, cache: KVCache, layer: int) -> "LayerPages":
        """Returns the pages of a layer."""
        keys, values, key_twins, value_twins = (_parts(each) for each in cache.parts(layer))
        return cls(keys, values, key_twins, value_twins, cache.twin_of)


def _parts(tensors: tuple[torch.Tensor, ...]) -> PageParts:
    # Triton 3.6 cannot compare a tuple that has a None with None, but its parts.
    return PageParts(*tensors) if tensors else PageParts(None)
