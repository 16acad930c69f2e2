"""The cache of a rank of native kernels: blocks, and the int8 twins of some of them."""

import numpy as np

from .....core.casts import Array
from ...kv_formats import INT8, CacheShape, hadamard_size, kv_format
from ...program.lower import Program
from .binding.memory import lazy
from .binding.structures import Format, NativeModel
from .sizes import PageSize, block_bytes


class NativeCache:
    """The blocks, zeroed; the system commits their pages as they are written.

    Args:
        program: the rank's program.
        cache: the shape.

    Attributes:
        num_bytes: the bytes of all blocks and twins.
    """

    def __init__(self, program: Program, cache: CacheShape) -> None:
        self._program, self._shape = program, cache
        sizes = block_bytes(program, cache)
        num_blocks, num_twins = cache.num_blocks + 1, (cache.num_twins or cache.num_blocks) + 1
        self.num_bytes = num_blocks * sizes.block + num_twins * sizes.twin
        self._blocks = lazy(num_blocks * sizes.block, large_pages=True).reshape(num_blocks, -1)
        self._twins = lazy(num_twins * sizes.twin).reshape(num_twins, -1)
        own = np.arange(num_blocks, dtype=np.int32)
        self._twin_of = np.zeros_like(own) if cache.num_twins else own  # 0, which stays zero, for blocks without one

    def fill(self, model: NativeModel) -> None:
        """Points a model's fields to this memory."""
        kind, dim, size = kv_format(self._shape.dtype), self._program.head_dim, self._shape.block_size
        model.key_format, model.value_format = Format[kind.keys.name.upper()], Format[kind.values.name.upper()]
        model.hadamard = hadamard_size(dim) if kind.is_rotated else 1
        model.block_size = size
        for i, vectors in enumerate((kind.keys, kind.values)):
            page = PageSize.of(vectors, dim, size)
            model.page_bytes[i], model.scale_offset[i] = page.num_bytes, page.elements
        twin = PageSize.of(INT8, dim, size)
        model.twin_page_bytes, model.twin_scale_offset = twin.num_bytes, twin.elements
        model.layer_bytes, model.twin_layer_bytes = (
            each.shape[1] // self._program.num_layers for each in (self._blocks, self._twins)
        )
        model.cache, model.twins, model.twin_of = (
            each.ctypes.data for each in (self._blocks, self._twins, self._twin_of)
        )

    def assign(self, twins: Array, forks: Array) -> None:
        """Assigns twins to blocks, and the content of others to blocks and to their twins: see `RunningPlan`."""
        shared, own = forks.T
        source = self._twin_of[shared]  # before it is assigned to another
        self._twin_of[twins[:, 0]] = twins[:, 1]
        if len(forks):
            self._blocks[own] = self._blocks[shared]
            self._twins[self._twin_of[own]] = self._twins[source]
