"""The memory of a rank beside its weights: the cache, and the buffers of rows that operations read and write."""

import numpy as np

from .....checkpoint.read.shared_read import ALONE, Peers
from .....core.casts import Array
from .....core.dtypes import BF16
from .....core.integers import ceil_div, round_up
from ...kv_formats import GROUP, INT8, VectorFormat, hadamard_size, kv_format
from ...options import MAX_HEAD_ROWS
from ...program.lower import Program, frequencies
from ...program.operations import Gate, Head, Multiply, Route, RunExperts
from ..backend import CacheShape
from ..sampler.block import results_bytes
from .binding.memory import aligned, floats, lazy
from .binding.structures import (
    ATTENTION_ROWS,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    EXPERT_TOKENS,
    KEY_SPLIT,
    KEY_TILE,
    MOST_ROWS,
    PANEL,
    SHARED_ITEMS,
    Buffer,
    Format,
    NativeModel,
)
from .link import SharedMemory
from .packing import pair_bytes, stacks


class State:
    """The cache and the buffers of a rank, zeroed; the kernel commits their pages as they are used.

    Attributes:
        kv_bytes: the bytes of the cache.
        max_head_rows: the number of rows of `logits`.
        logits: fp32 [max_head_rows, tp, padded vocabulary rows of a rank].
        twin_of: int32 [blocks], the twin of each; 0 for those without one.
        results: uint8, the samples of all ranks (see `SamplingBlock`), in memory that they share.
    """

    def __init__(
        self,
        program: Program,
        cache: CacheShape,
        max_tokens: int,
        peers: Peers = ALONE,
        weight_dtype: str = "auto",
    ) -> None:
        self._program, self._cache, self._max_tokens = program, cache, max_tokens
        self._prepared_width = _prepared_width(program, weight_dtype)
        self._kept: list[Array] = []
        widths = _widths(program)
        self.strides = {buffer: round_up(width, PANEL) for buffer, width in widths.items()}
        self.max_head_rows = min(MAX_HEAD_ROWS, max_tokens)
        rows = dict.fromkeys(Buffer, max_tokens) | {Buffer.LOGITS: self.max_head_rows}
        self.buffers = {buffer: self._keep(floats(rows[buffer], width)) for buffer, width in self.strides.items()}
        num_results = results_bytes(self.max_head_rows)
        self._shared: SharedMemory | None = None
        self.results = np.zeros(num_results, np.uint8)
        if peers.size > 1:
            logits_floats = self.buffers[Buffer.LOGITS].size
            self._shared = SharedMemory.open(peers, max_tokens * program.hidden_size, logits_floats, num_results)
            self.buffers[Buffer.LOGITS], self.results = self._shared.logits, self._shared.results
        self.logits = self.buffers[Buffer.LOGITS].reshape(self.max_head_rows, program.tp, -1)
        self.kv_bytes = 0

    def fill(self, model: NativeModel, threads: int) -> None:
        """Points a model's fields to this memory."""
        for buffer, values in self.buffers.items():
            model.buffers[buffer], model.strides[buffer] = values.ctypes.data, self.strides[buffer]
        if self._shared is not None:
            self._shared.fill(model)
        self._fill_cache(model)
        self._fill_experts(model)
        program, tokens = self._program, self._max_tokens
        if program.rope is not None:
            radians = np.array(frequencies(program.rope, program.head_dim), np.float32)
            model.frequencies = self._pointer(radians)
            model.cosines = self._pointer(floats(tokens, program.head_dim // 2))
            model.sines = self._pointer(floats(tokens, program.head_dim // 2))
        self._fill_scratch(model, threads)

    def assign(self, twins: Array, forks: Array) -> None:
        """Assigns twins to blocks, and the content of others to blocks and to their twins: see `RunningPlan`."""
        shared, own = forks.T
        source = self.twin_of[shared]  # before it is assigned to another
        self.twin_of[twins[:, 0]] = twins[:, 1]
        if len(forks):
            self._blocks[own] = self._blocks[shared]
            self._twins[self.twin_of[own]] = self._twins[source]

    def _fill_cache(self, model: NativeModel) -> None:
        program, cache = self._program, self._cache
        kind, heads, dim = kv_format(cache.dtype), program.num_kv_heads, program.head_dim
        model.key_format, model.value_format = Format[kind.keys.name.upper()], Format[kind.values.name.upper()]
        model.hadamard = hadamard_size(dim) if kind.is_rotated else 1
        model.block_size = cache.block_size
        for i, vectors in enumerate((kind.keys, kind.values)):
            model.page_bytes[i], model.scale_offset[i] = _page(vectors, dim, cache.block_size)
        model.layer_bytes = heads * sum(model.page_bytes)
        model.twin_page_bytes, model.twin_scale_offset = _page(INT8, dim, cache.block_size)
        model.twin_layer_bytes = heads * kind.num_twins * model.twin_page_bytes
        counts = 1 + np.array((cache.num_blocks, cache.num_twins or cache.num_blocks))
        sizes = program.num_layers * np.array((model.layer_bytes, model.twin_layer_bytes))
        self.kv_bytes = int(counts @ sizes)
        self._blocks = lazy(int(counts[0] * sizes[0]), large_pages=True).reshape(counts[0], -1)
        self._twins = lazy(int(counts[1] * sizes[1])).reshape(counts[1], -1)
        model.cache, model.twins = self._pointer(self._blocks), self._pointer(self._twins)
        self.twin_of = np.arange(cache.num_blocks + 1, dtype=np.int32)
        if cache.num_twins:
            self.twin_of[:] = 0
        model.twin_of = self._pointer(self.twin_of)

    def _fill_scratch(self, model: NativeModel, threads: int) -> None:
        """Points a model to the threads' scratch, to prepared rows, and to splits of attention: see c/attention.h."""
        head, rows = round_up(self._program.head_dim, PANEL), ATTENTION_ROWS
        softmax = rows * head + round_up(2 * rows, PANEL)
        scales = rows * 2 + KEY_TILE + round_up(rows * (1 + ceil_div(head, GROUP)), PANEL)
        widened = head * self._cache.block_size if kv_format(self._cache.dtype).is_rotated else 0
        attention = rows * (2 * head + KEY_TILE + KEY_TILE // 2) + scales + 2 * softmax + widened
        width = self._prepared_width
        gathered = MOST_ROWS * (self.strides[Buffer.NORMED] + width // 2)  # rows of an expert, then prepared
        model.scratch_floats = round_up(max(attention, gathered), PANEL)
        model.scratch = self._pointer(floats(threads, model.scratch_floats))
        model.rounded_values = round_up(self._max_tokens, BLOCK_ROWS) * width
        model.rounded = self._pointer(aligned(BF16.itemsize * model.rounded_values))
        splits = ceil_div(self._cache.num_blocks * self._cache.block_size, KEY_SPLIT)
        items = SHARED_ITEMS * threads if threads > 1 and splits > 1 else 0
        model.parts = self._pointer(lazy(4 * items * splits * softmax))  # a step with one row of each commits little
        model.parts_done = self._pointer(np.zeros(items, np.int32))

    def _fill_experts(self, model: NativeModel) -> None:
        experts = [each for each in self._program.operations if isinstance(each, RunExperts)]
        top_k = max((each.top_k for each in self._program.operations if isinstance(each, Route)), default=0)
        if not experts:
            return
        pairs, inner = EXPERT_TOKENS * top_k, max(each.inner for each in experts)
        slices, count = max(each.num_slices for each in experts), max(each.num_experts for each in experts)
        model.chosen = self._pointer(np.zeros((self._max_tokens, top_k), np.int32))
        model.chosen_weights = self._pointer(floats(self._max_tokens, top_k))
        model.pairs = self._pointer(np.zeros(2 * pairs + count + 1, np.int32))
        model.expert_inner_stride, model.expert_gated_stride = round_up(2 * inner, PANEL), round_up(inner, PANEL)
        model.expert_inner = self._pointer(floats(pairs, model.expert_inner_stride))
        model.expert_gated = self._pointer(floats(pairs, model.expert_gated_stride))
        model.expert_out = self._pointer(floats(slices * pairs, self.strides[Buffer.PARTIAL]))

    def _keep(self, values: Array) -> Array:
        self._kept.append(values)
        return values

    def _pointer(self, values: Array) -> int:
        return int(self._keep(values).ctypes.data)


def _widths(program: Program) -> dict[Buffer, int]:
    heads, dim = program.num_heads * program.head_dim, program.head_dim
    products = {each.target: each.matrix.out_features for each in program.operations if isinstance(each, Multiply)}
    head = next(each.matrix for each in program.operations if isinstance(each, Head))
    return {
        Buffer.HIDDEN: program.hidden_size,
        Buffer.NORMED: program.hidden_size,
        Buffer.QKV: heads + 2 * program.num_kv_heads * dim,
        Buffer.QUERY: heads,
        Buffer.ATTENDED: heads,
        Buffer.INNER: products.get("inner", 0),
        Buffer.GATED: max((each.columns for each in program.operations if isinstance(each, Gate)), default=0),
        Buffer.PARTIAL: program.hidden_size,
        Buffer.SCORES: max((e.matrix.out_features for e in program.operations if isinstance(e, Route)), default=0),
        Buffer.LOGITS: program.tp * round_up(head.out_features, PANEL),
    }


def _prepared_width(program: Program, weight_dtype: str) -> int:
    """Returns the room, in values of 2 bytes, of the widest row that a product prepares: c/rounded.h, c/quantized.h."""
    shapes = [stack for _, stack in stacks(program, weight_dtype)]
    rounded = (each.slices * round_up(each.inputs // each.slices, BLOCK_COLUMNS) for each in shapes)
    floats = (each.grouping.row_floats(each.inputs) for each in shapes if each.grouping)
    return max([*rounded, *(2 * count for count in floats)])


def _page(vectors: VectorFormat, head_dim: int, block_size: int) -> tuple[int, int]:
    """Returns the bytes of a page of keys or values, and those before its scales."""
    elements = round_up(head_dim, PANEL) * block_size * pair_bytes(Format[vectors.name.upper()]) // (2 * PANEL)
    return elements + vectors.num_scale_bytes(head_dim) * block_size, elements
