"""The operations that have kernels of their own; the rest of a step is torch's, whose products are cuBLAS's.

Every operation has fixed shapes, waits for nothing and reads numbers of the step from the device alone, so that a graph
can hold it. Letters: T tokens, S spans, R rows of logits, D hidden size, H query heads, E head dim, V vocabulary.
"""

from typing import Protocol

import torch

from ......core.casts import Array
from ......model.rope import Rotation
from ......parallel.coded_weight import CodedWeight
from ....program.operations import AttendToCache, Norm, RotateAndAppend
from ...aten.expert_products import ExpertRows
from ...aten.prepared_weights import PreparedProduct
from ..step.device_tables import ExpertPairs, RowOptions, StepOnDevice
from ..step.step_adapters import RowTiles, StepAdapters


class GpuKernels(Protocol):
    """The kernels of a rank, with its weights and its cache."""

    def query_tiles(self, span_length: Array) -> Array:
        """Returns the tiles of the queries of spans (see `StepOnDevice.tiles`), of spans of any number of tokens."""

    def add_norm(
        self,
        hidden_TD: torch.Tensor,
        added_TD: torch.Tensor | None,
        bias: str,
        norm: Norm,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """Adds rows and a bias ("" for none) to hidden, in place, and returns the norm of the sum: [T, D].

        Rows with adapters take the vectors of these, if they have some of their own.
        """

    def gate(self, inner_TF: torch.Tensor, kind: str) -> torch.Tensor:
        """Returns the activation of inner (see `Gate`): [T, 2 I] or [T, I] -> [T, I]."""

    def product(self, x_TK: torch.Tensor, product: PreparedProduct, rounds: bool = True) -> torch.Tensor:
        """Returns the product with a weight in floats, fp32 if it does not round: [T, K] -> [T, N]."""

    def coded_product(
        self, x_TK: torch.Tensor, weight: CodedWeight, bias_N: torch.Tensor | None, rounds: bool = True
    ) -> torch.Tensor:
        """Returns the product with a quantized weight, fp32 if it does not round: [T, K] -> [T, N]."""

    def gated_coded_product(self, x_TK: torch.Tensor, weight: CodedWeight) -> torch.Tensor | None:
        """Returns silu(gate) * up of the product with gate above up: [T, K] -> [T, N / 2]; None for many rows."""

    def add_adapters(self, name: str, x_TD: torch.Tensor, sums_TF: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """Adds what adapters add to products with a weight, and rounds: [T, F], in the dtype of x.

        Args:
            name: the weight.
            x_TD: the rows.
            sums_TF: their products with it, fp32.
            tiles: all rows, see `StepAdapters`; those of pairs have the keys of `pair_tiles`.
        """

    def expert_product(
        self, x_PD: torch.Tensor, rows: ExpertRows, pairs: ExpertPairs, rounds: bool = True
    ) -> torch.Tensor:
        """Returns the product of each pair's row with its expert's weight: [P, D] -> [P, F].

        Args:
            x_PD: the row of each pair.
            rows: the weights of all experts, one below the other, [E * F, D].
            pairs: their experts.
            rounds: whether the product has the dtype of the rows, else fp32.
        """

    def rotate_and_append(
        self, operation: RotateAndAppend, qkv_TF: torch.Tensor, rotary: Rotation | None, step: StepOnDevice
    ) -> torch.Tensor:
        """Norms and rotates queries and keys, stores keys and values, and returns the queries: [T, H E]."""

    def attend(self, operation: AttendToCache, query_TF: torch.Tensor, step: StepOnDevice) -> torch.Tensor:
        """Returns the attention of queries to the cache, [T, H E]; anything for padding."""

    def sample(self, logits_RV: torch.Tensor, options: RowOptions) -> torch.Tensor:
        """Returns the token of each row, and whether all its logits are finite: int32 [2, R]."""

    def advance(self, columns: torch.Tensor, tables: torch.Tensor, sampled_R: torch.Tensor) -> None:
        """Moves DECODE_COLUMNS on by a token of each row, in place, but for padding."""
