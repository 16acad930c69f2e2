"""The kernels of a rank on Triton: the launches that its operations take."""

from typing import Final

import torch

from .....core.casts import Array
from .....model.rope import Rotation
from .....parallel.coded_weight import CodedWeight
from .....parallel.grouped_products import fits_kernel, grouped_linear
from .....parallel.row_groups import RowGroups
from ...program.operations import AttendToCache, Norm, RotateAndAppend
from ..aten.expert_products import ExpertRows
from ..aten.prepared_weights import PreparedProduct
from .append import HeadWeights, rotate_and_append
from .attention import Spans
from .paged_attention import LaunchedAttention, query_tiles
from .rows import low_rank, norms, samples
from .rows.fixed_products import fixed_product
from .rows.interpreted import is_interpreted
from .rows.launched_products import FEW_ROWS, multiply_rows, multiply_tiles
from .run.kernels import GpuKernels
from .run.loaded_rank import LoadedRank
from .step.device_tables import ExpertPairs, RowOptions, StepOnDevice
from .step.step_adapters import RowTiles, StepAdapters

_FEW_PAIRS: Final = 16  # of tokens and experts, whose rows are multiplied one by one
_FIXED_TILE: Final = 16  # rows of products with weights in codes and with those of experts


class TritonKernels(GpuKernels):
    """`GpuKernels` on Triton.

    Args:
        loaded: what the rank computes with.
        longest: the largest number of tokens of a sequence.
        most_rows: the rows of the largest bucket.
    """

    def __init__(self, loaded: LoadedRank, longest: int, most_rows: int) -> None:
        program, weights, cache = loaded.program, loaded.weights, loaded.cache
        self._weights, self._cache = weights, cache
        compute = torch.float32 if is_interpreted() else weights.dtype  # the interpreter multiplies bf16 wrongly
        self._attention = LaunchedAttention(cache, program.num_heads, compute, longest)
        self._factors = {layer: each.float().contiguous() for layer, each in weights.key_factors.items()}
        self._scratch = self._attention.scratch(most_rows)
        # Of steps of buckets, whose padding nothing writes: it stays finite.
        self._attended = torch.zeros(
            most_rows, program.num_heads * program.head_dim, dtype=weights.dtype, device=cache.device
        )
        self._query_columns = program.num_heads * program.head_dim
        self._adapters = loaded.adapters

    def query_tiles(self, span_length: Array) -> Array:
        """See `GpuKernels`."""
        return query_tiles(span_length, self._attention.tokens)

    def add_norm(
        self,
        hidden_TD: torch.Tensor,
        added_TD: torch.Tensor | None,
        bias: str,
        norm: Norm,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """See `GpuKernels`."""
        added = added_TD, self._weights[bias] if bias else None
        shift = self._weights[norm.bias] if norm.kind == "layer" else None
        own = self._own(norm.weight, adapters)
        return norms.add_norm(hidden_TD, added, self._weights[norm.weight], shift, norm.eps, own)

    def gate(self, inner_TF: torch.Tensor, kind: str) -> torch.Tensor:
        """See `GpuKernels`."""
        return norms.gate(inner_TF, kind)

    def product(self, x_TK: torch.Tensor, product: PreparedProduct, rounds: bool = True) -> torch.Tensor:
        """See `GpuKernels`."""
        return product(x_TK) if rounds else product.unrounded(x_TK)

    def coded_product(
        self, x_TK: torch.Tensor, weight: CodedWeight, bias_N: torch.Tensor | None, rounds: bool = True
    ) -> torch.Tensor:
        """See `GpuKernels`."""
        multiply = multiply_rows if len(x_TK) <= FEW_ROWS else multiply_tiles
        return multiply(x_TK, weight, bias_N, rounds=rounds)

    def gated_coded_product(self, x_TK: torch.Tensor, weight: CodedWeight) -> torch.Tensor | None:
        """See `GpuKernels`."""
        return multiply_rows(x_TK, weight, is_gated=True) if len(x_TK) <= FEW_ROWS else None

    def add_adapters(self, name: str, x_TD: torch.Tensor, sums_TF: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """See `GpuKernels`."""
        assert self._adapters is not None, "rows with adapters have slots"
        return low_rank.add_adapters(x_TD, sums_TF, self._adapters.lines(name), self._adapters.ranks[name], tiles)

    def expert_product(
        self, x_PD: torch.Tensor, rows: ExpertRows, pairs: ExpertPairs, rounds: bool = True
    ) -> torch.Tensor:
        """See `GpuKernels`."""
        if len(x_PD) <= _FEW_PAIRS:
            return multiply_rows(x_PD, rows, pairs=pairs, rounds=rounds)
        if isinstance(rows, torch.Tensor) and rounds:
            weight_EFD = rows.unflatten(0, (len(pairs.ends), -1))
            if fits_kernel(x_PD, weight_EFD) and fits_kernel(x_PD, weight_EFD.mT):  # else it would wait for lengths
                return grouped_linear(x_PD, weight_EFD, RowGroups(pairs.ends))
        return multiply_tiles(x_PD, rows, pairs=pairs, rounds=rounds)

    def rotate_and_append(
        self, operation: RotateAndAppend, qkv_TF: torch.Tensor, rotary: Rotation | None, step: StepOnDevice
    ) -> torch.Tensor:
        """See `GpuKernels`."""
        weights, layer = self._weights, operation.layer
        q_norm, k_norm = (weights[name] if name else None for name in (operation.q_norm, operation.k_norm))
        own = self._own(operation.q_norm, step.adapters if operation.q_norm else None)
        heads = HeadWeights(q_norm, k_norm, self._factors.get(layer), operation.eps, own)
        query_TF = qkv_TF.new_empty(len(qkv_TF), self._query_columns)
        rotate_and_append(self._cache, layer, qkv_TF.contiguous(), query_TF, step.slots, rotary, heads)
        return query_TF

    def attend(self, operation: AttendToCache, query_TF: torch.Tensor, step: StepOnDevice) -> torch.Tensor:
        """See `GpuKernels`."""
        return self._attend(operation, query_TF, step, is_split=step.is_decoding)

    def _attend(
        self, operation: AttendToCache, query_TF: torch.Tensor, step: StepOnDevice, is_split: bool
    ) -> torch.Tensor:
        """Attends to the cache; `is_split`: by a program for each split of the keys, which spans of one token allow."""
        out_TF = self._attended[: len(query_TF)] if step.is_decoding else torch.empty_like(query_TF)
        spans = Spans(step.tiles, step.firsts, step.starts, step.lengths, step.tables)
        place = operation.layer, operation.window, query_TF, out_TF, spans
        if is_split:
            self._attention.decode(*place, self._scratch)
        else:
            self._attention.attend(*place)
        return out_TF

    def sample(self, logits_RV: torch.Tensor, options: RowOptions) -> torch.Tensor:
        """See `GpuKernels`."""
        return samples.sample(logits_RV, options)

    def advance(self, columns: torch.Tensor, tables: torch.Tensor, sampled_R: torch.Tensor) -> None:
        """See `GpuKernels`."""
        samples.advance(columns, tables, sampled_R, self._cache.block_size)

    def _own(self, norm: str, adapters: StepAdapters | None) -> norms.OwnVectors:
        """Returns the vectors of a norm by the adapters of rows."""
        if adapters is None or self._adapters is None:
            return norms.NO_VECTORS
        return norms.OwnVectors(adapters.numbers, self._adapters.lines(norm))


class FixedKernels(TritonKernels):
    """`TritonKernels` whose rows have the same bits in any batch: `Job.batch_invariant`.

    Every operation has one way, whatever the number of rows. Norms, gates, factors of adapters and what stores keys
    have only one anyway.
    """

    def product(self, x_TK: torch.Tensor, product: PreparedProduct, rounds: bool = True) -> torch.Tensor:
        """See `GpuKernels`."""
        return fixed_product(x_TK, product, rounds)

    def coded_product(
        self, x_TK: torch.Tensor, weight: CodedWeight, bias_N: torch.Tensor | None, rounds: bool = True
    ) -> torch.Tensor:
        """See `GpuKernels`."""
        return multiply_tiles(x_TK, weight, bias_N, size=_FIXED_TILE, rounds=rounds)

    def gated_coded_product(self, x_TK: torch.Tensor, weight: CodedWeight) -> torch.Tensor | None:
        """See `GpuKernels`: never, as many rows are gated apart."""
        return None

    def expert_product(
        self, x_PD: torch.Tensor, rows: ExpertRows, pairs: ExpertPairs, rounds: bool = True
    ) -> torch.Tensor:
        """See `GpuKernels`."""
        return multiply_tiles(x_PD, rows, pairs=pairs, size=_FIXED_TILE, rounds=rounds)

    def attend(self, operation: AttendToCache, query_TF: torch.Tensor, step: StepOnDevice) -> torch.Tensor:
        """See `GpuKernels`: single tokens are attended as those of a prompt are."""
        return self._attend(operation, query_TF, step, is_split=False)
