"""The memory of a rank beside its weights and its cache: buffers of rows, and areas that operations use."""

import numpy as np

from .....checkpoint.read.shared_read import ALONE, Peers
from .....core.casts import Array
from .....core.integers import ceil_div
from ...kv_formats import CacheShape
from ...program.lower import Program, frequencies
from ..sampler.block import results_bytes
from .binding.memory import aligned, floats, lazy
from .binding.structures import KEY_SPLIT, SHARED_ITEMS, Buffer, NativeModel
from .link import SharedMemory
from .sizes import BufferSizes


class RankBuffers:
    """The buffers of a rank, zeroed; the system commits their pages as they are used.

    Args:
        program: the rank's program.
        cache: the shape of its cache.
        max_tokens: the largest number of tokens of a step.
        peers: the ranks of the model.
        weight_dtype: see EngineOptions.
        adapter_rank: the largest rank of an adapter; 0 without adapters.

    Attributes:
        logits: fp32 [rows, tp, padded vocabulary rows of a rank].
        results: uint8, the samples of all ranks (see `SamplingBlock`), in memory that they share.
    """

    def __init__(
        self,
        program: Program,
        cache: CacheShape,
        max_tokens: int,
        threads: int,
        peers: Peers = ALONE,
        weight_dtype: str = "auto",
        adapter_rank: int = 0,
    ) -> None:
        self._sizes = sizes = BufferSizes.of(program, cache, max_tokens, threads, weight_dtype, adapter_rank)
        self._rows = {buffer: floats(sizes.rows[buffer], stride) for buffer, stride in sizes.strides.items()}
        self._areas = {name: aligned(size) for name, size in sizes.areas.items()}
        if program.rope is not None:
            self._areas["frequencies"] = frequencies(program.rope, program.head_dim).astype(np.float32)
        splits = ceil_div(cache.num_blocks * cache.block_size, KEY_SPLIT)
        items = SHARED_ITEMS * threads if threads > 1 and splits > 1 else 0
        # A step with one row of each item commits little.
        self._areas["parts"], self._areas["parts_done"] = lazy(4 * items * splits * sizes.softmax), lazy(4 * items)
        head_rows, self._shared = sizes.rows[Buffer.LOGITS], None
        self.results: Array = np.zeros(results_bytes(head_rows), np.uint8)
        if peers.size > 1:
            logits_floats = self._rows[Buffer.LOGITS].size
            self._shared = SharedMemory.open(peers, max_tokens * program.hidden_size, logits_floats, self.results.size)
            self._rows[Buffer.LOGITS], self.results = self._shared.logits, self._shared.results
        self.logits: Array = self._rows[Buffer.LOGITS].reshape(head_rows, program.tp, -1)

    def fill(self, model: NativeModel) -> None:
        """Points a model's fields to this memory."""
        for buffer, values in self._rows.items():
            model.buffers[buffer], model.strides[buffer] = values.ctypes.data, self._sizes.strides[buffer]
        for name, area in self._areas.items():
            setattr(model, name, area.ctypes.data)
        for name, number in self._sizes.numbers.items():
            setattr(model, name, number)
        if self._shared is not None:
            self._shared.fill(model)
