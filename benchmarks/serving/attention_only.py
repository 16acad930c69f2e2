"""Attention of the native kernels alone: a cache that is filled with random keys and values, and steps that read it."""

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Final

import numpy as np

from tk.core.casts import Array
from tk.core.integers import ceil_div
from tk.infer.engine.kernels.native.binding.library import Kernels
from tk.infer.engine.kernels.native.binding.structures import (
    Buffer,
    Format,
    NativeModel,
    OperationKind,
    PreparedOperation,
    StepArrays,
)
from tk.infer.engine.kernels.native.buffers import RankBuffers
from tk.infer.engine.kernels.native.kv_cache import NativeCache
from tk.infer.engine.kernels.native.sizes import block_bytes
from tk.infer.engine.kv_formats import CacheShape
from tk.infer.engine.program.lower import Program
from tk.infer.engine.program.operations import Head, WeightMatrix

HEADS: Final = 9  # those of SmolLM2-135M
KV_HEADS: Final = 3
HEAD_DIM: Final = 64
BLOCK: Final = 32


class AttentionOnly:
    """Sequences of one length in a cache, and the operations of attention in all layers of a model in bf16.

    Args:
        kernels: the kernels of an instruction set.
        kv_dtype: the dtype of the cache.
        layers: the number of layers.
        sequences: the number of sequences.
        length: the tokens of each, at most.
        step: the tokens of a step over all sequences, at most.
        threads: the number of threads.
    """

    def __init__(
        self, kernels: Kernels, kv_dtype: str, layers: int, sequences: int, length: int, step: int, threads: int = 1
    ) -> None:
        self._kernels, self._step, self._layers = kernels, step, layers
        head = Head(WeightMatrix("head", HEADS * HEAD_DIM, 16))
        program = Program((head,), (), 1, 0, layers, HEADS * HEAD_DIM, HEADS, KV_HEADS, HEAD_DIM, None, 16)
        blocks = ceil_div(length, BLOCK)
        shape = CacheShape(blocks * sequences, BLOCK, kv_dtype)
        self._tables: Array = 1 + np.arange(blocks * sequences, dtype=np.int32).reshape(sequences, blocks)
        self._cache, self._buffers = NativeCache(program, shape), RankBuffers(program, shape, step, threads)
        self._bytes = block_bytes(program, shape).block
        self._model = NativeModel(
            tp=1,
            num_layers=layers,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            weight_format=Format.BF16,
            attention_scaling=1.0,
            hidden_size=program.hidden_size,
        )
        self._cache.fill(self._model)
        self._buffers.fill(self._model)
        places = {each: self._model.strides[each] for each in (Buffer.QKV, Buffer.QUERY)}
        for buffer, stride in places.items():
            values = np.random.default_rng(0).standard_normal((step, stride), np.float32)
            ctypes.memmove(self._model.buffers[buffer], values.ctypes.data, values.nbytes)
        kernels.start_threads(byref(self._model), threads)

    def close(self) -> None:
        """Ends the threads."""
        self._kernels.stop_threads(byref(self._model))

    def fill(self, tokens: int) -> None:
        """Appends the first tokens of each sequence."""
        for sequence in range(len(self._tables)):
            for start in range(0, tokens, self._step):
                self._run(OperationKind.APPEND, (sequence,), start, min(self._step, tokens - start))

    def attend(self, start: int, length: int) -> None:
        """Computes attention of the tokens [start, start + length) of each sequence to those before, in all layers."""
        self._run(OperationKind.ATTEND, range(len(self._tables)), start, length)

    def pieces(self, tokens: int) -> tuple[Array, int]:
        """Returns the addresses of the parts of blocks, layer by layer, that hold tokens, and the bytes of each."""
        blocks = self._tables[:, : ceil_div(tokens, BLOCK)].astype(np.uint64).reshape(1, -1)
        layers = np.arange(self._layers, dtype=np.uint64)[:, None] * np.uint64(self._model.layer_bytes)
        return (
            blocks * np.uint64(self._bytes) + layers + np.uint64(self._model.cache)
        ).ravel(), self._model.layer_bytes

    def _run(self, kind: OperationKind, sequences: Sequence[int], start: int, length: int) -> None:
        made = [PreparedOperation(kind=kind, layer=layer) for layer in range(self._layers)]
        operations = (PreparedOperation * (self._layers + 1))(*made, PreparedOperation(kind=OperationKind.HEAD))
        tables = np.ascontiguousarray(self._tables[list(sequences)])
        positions = np.tile(np.arange(start, start + length, dtype=np.int32), len(tables))
        rows = np.repeat(np.arange(len(tables)), length)
        slots = (tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
        spans = np.zeros((len(tables), 4), np.int32)
        spans[:, 0], spans[:, 1] = np.arange(len(tables)) * length, length
        spans[:, 3] = np.arange(len(tables)) * tables.shape[1]
        tokens, unused = len(positions), np.zeros(len(positions), np.int32)
        if kind == OperationKind.ATTEND:
            slots |= 1  # no block begins, so none is cleared
        arrays = (unused, positions, slots, spans, tables, unused, np.empty(tokens, np.int32), unused)
        self._model.operations, self._model.num_operations = addressof(operations), self._layers
        self._model.step = StepArrays(tokens, len(tables), 0, 0, *(each.ctypes.data for each in arrays), 0)
        self._model.head_first = self._model.head_count = 0
        self._kernels.step(byref(self._model))
