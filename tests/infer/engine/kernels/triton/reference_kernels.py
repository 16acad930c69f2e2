"""The operations of the backend's kernels on torch and numpy, for machines without Triton: the oracles are ATen's."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tk.core.casts import Array
from tk.infer.engine.kernels.aten.adapted_products import AdaptedRange, by_own
from tk.infer.engine.kernels.aten.expert_products import ExpertRows
from tk.infer.engine.kernels.aten.paged_attention import PagedAttention
from tk.infer.engine.kernels.aten.prepared_weights import CodedProduct, PreparedProduct
from tk.infer.engine.kernels.sampler.numpy_sampler import sample
from tk.infer.engine.kernels.step_tensors import StepTensors
from tk.infer.engine.kernels.triton.run.loaded_rank import LoadedRank
from tk.infer.engine.kernels.triton.step.device_tables import ExpertPairs, RowOptions, StepOnDevice
from tk.infer.engine.kernels.triton.step.step_adapters import RowTiles, StepAdapters
from tk.infer.engine.kernels.triton.step.step_columns import TILE
from tk.infer.engine.program.operations import AttendToCache, Norm, RotateAndAppend
from tk.infer.engine.step.running_plan import TokenSpan
from tk.model.activation import gelu_new, swiglu
from tk.model.norm import rms_norm
from tk.model.rope import Rotation, rotate
from tk.parallel.coded_weight import CodedWeight
from tk.parallel.products import linear, wide_linear
from tk.parallel.wide_sums import layer_norm
from tk.tests.infer.sampling_row import SamplingRow, pack


class ReferenceKernels:
    """`Kernels` on ATen's operators."""

    def __init__(self, loaded: LoadedRank, longest: int, most_rows: int) -> None:
        self._program, self._weights, self._cache = loaded.program, loaded.weights, loaded.cache
        self._adapters = loaded.adapters

    def add_norm(
        self,
        hidden_TD: torch.Tensor,
        added_TD: torch.Tensor | None,
        bias: str,
        norm: Norm,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """See `Kernels`."""
        if added_TD is not None:
            hidden_TD += added_TD + self._weights[bias] if bias else added_TD
        if norm.kind == "rms":
            return self._rms_norm(norm.weight, hidden_TD, norm.eps, adapters)
        names, ranges = (norm.weight, norm.bias), self._ranges(adapters)
        return by_own(names, self._weights, ranges, partial(layer_norm, hidden_TD, eps=norm.eps))

    def add_adapters(self, name: str, x_TD: torch.Tensor, sums_TF: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """See `Kernels`."""
        assert self._adapters is not None
        found_TF = sums_TF.clone()
        numbers = len(self._adapters.lines(name))
        for key, first, stop in zip(*(each.tolist() for each in tiles), strict=True):
            rows, adapter = slice(first, min(first + TILE, stop)), self._adapters.held.get(key % numbers - 1)
            if first < stop and adapter is not None:
                if name in adapter.products:
                    adapter.products[name][key // numbers].add_to([found_TF], rows, x_TD)
                if name in adapter.changes:
                    found_TF[rows] += adapter.changes[name]
        return found_TF.to(x_TD.dtype)

    def _rms_norm(self, name: str, x_TD: torch.Tensor, eps: float, adapters: StepAdapters | None) -> torch.Tensor:
        return by_own((name,), self._weights, self._ranges(adapters), partial(rms_norm, x_TD, eps=eps))

    def _ranges(self, adapters: StepAdapters | None) -> list[AdaptedRange]:
        """Returns a range of each row with an adapter."""
        if adapters is None or self._adapters is None:
            return []
        held = self._adapters.held
        slots = [(row, number - 1) for row, number in enumerate(adapters.numbers.tolist())]
        return [AdaptedRange(slice(row, row + 1), held[slot]) for row, slot in slots if slot in held]

    def query_tiles(self, span_length: Array) -> Array:
        """See `Kernels`: one tile per span."""
        spans = np.arange(len(span_length), dtype=np.int32)
        return np.stack([spans, np.zeros_like(spans)], axis=1)

    def gate(self, inner_TF: torch.Tensor, kind: str) -> torch.Tensor:
        """See `Kernels`."""
        return swiglu(inner_TF) if kind == "swiglu" else gelu_new(inner_TF)

    def product(self, x_TK: torch.Tensor, product: PreparedProduct, rounds: bool = True) -> torch.Tensor:
        """See `Kernels`."""
        return product(x_TK) if rounds else product.unrounded(x_TK)

    def coded_product(
        self, x_TK: torch.Tensor, weight: CodedWeight, bias_N: torch.Tensor | None, rounds: bool = True
    ) -> torch.Tensor:
        """See `Kernels`."""
        product = CodedProduct(weight, 1, bias_N)
        return product(x_TK) if rounds else product.slice_sums(x_TK)[0]

    def gated_coded_product(self, x_TK: torch.Tensor, weight: CodedWeight) -> torch.Tensor | None:
        """See `Kernels`."""
        return swiglu(CodedProduct(weight, 1, None)(x_TK)) if len(x_TK) == 1 else None

    def expert_product(
        self, x_PD: torch.Tensor, rows: ExpertRows, pairs: ExpertPairs, rounds: bool = True
    ) -> torch.Tensor:
        """See `Kernels`."""
        multiply = linear if rounds else wide_linear
        num_rows = rows.shape[0] // len(pairs.ends)
        experts = [slice(expert * num_rows, (expert + 1) * num_rows) for expert in pairs.experts.tolist()]
        return torch.cat([multiply(x_PD[i : i + 1], rows[place]) for i, place in enumerate(experts)])

    def rotate_and_append(
        self, operation: RotateAndAppend, qkv_TF: torch.Tensor, rotary: Rotation | None, step: StepOnDevice
    ) -> torch.Tensor:
        """See `Kernels`."""
        program, weights = self._program, self._weights
        heads = qkv_TF.unflatten(-1, (-1, program.head_dim))
        query, key, value = heads.split((program.num_heads, program.num_kv_heads, program.num_kv_heads), dim=-2)
        if operation.q_norm:
            query = self._rms_norm(operation.q_norm, query, operation.eps, step.adapters)
            key = self._rms_norm(operation.k_norm, key, operation.eps, step.adapters)
        if rotary is not None:
            by = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
            query, key = rotate(query, by), rotate(key, by)
        if (factors := weights.key_factors.get(operation.layer)) is not None:
            group = program.num_heads // program.num_kv_heads
            query, key = query * factors.repeat_interleave(group, dim=0), key / factors
        real = step.slots >= 0
        slots = step.slots[real].long()
        size = self._cache.block_size
        places = self._cache.places(slots, slots[slots % size == 0] // size)
        self._cache.append(operation.layer, places, key[real], value[real])
        flat: torch.Tensor = query.flatten(1)
        return flat

    def attend(self, operation: AttendToCache, query_TF: torch.Tensor, step: StepOnDevice) -> torch.Tensor:
        """See `Kernels`."""
        spans = [
            TokenSpan(first, start, start + length, table)
            for first, start, length, table in zip(
                step.firsts.tolist(), step.starts.tolist(), step.lengths.tolist(), step.tables.numpy(), strict=True
            )
            if length
        ]
        query_THE: torch.Tensor = query_TF.unflatten(-1, (-1, self._program.head_dim))
        if not spans:
            return torch.zeros_like(query_TF)
        numbers, windows = StepTensors(self._cache.device), [operation.window]
        slots = np.empty(0, np.int32)
        attention = PagedAttention(self._cache, spans, slots, self._program.num_heads, windows, numbers)
        numbers.send()
        attended: torch.Tensor = attention.attend(operation.layer, operation.window, query_THE).flatten(1)
        return attended

    def sample(self, logits_RV: torch.Tensor, options: RowOptions) -> torch.Tensor:
        """See `Kernels`."""
        rows = pack([SamplingRow(token=row) for row in range(len(logits_RV))])
        columns = {name: each.numpy() for name, each in options.columns.items()}
        seeds = np.stack([columns.pop("seed_low"), columns.pop("seed_high")], axis=1)
        rows = replace(rows, seed=np.ascontiguousarray(seeds).view(np.uint64)[:, 0], **columns)
        output = sample(logits_RV.numpy(), rows)
        return torch.from_numpy(np.stack([output.token_ids, output.finite.astype(np.int32)]))

    def advance(self, columns: torch.Tensor, tables: torch.Tensor, sampled_R: torch.Tensor) -> None:
        """See `Kernels`."""
        size, real = self._cache.block_size, columns[1] >= 0
        columns[0][real] = sampled_R[real]
        for line in (1, 7):
            columns[line][real] += 1
        positions = columns[1][real].long()
        blocks = tables[real].gather(1, (positions // size).clamp_max(tables.shape[1] - 1).unsqueeze(1))[:, 0]
        columns[2][real] = (blocks * size + positions % size).int()
