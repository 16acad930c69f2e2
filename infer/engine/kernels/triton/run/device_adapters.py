"""The adapters of a rank as addresses in a table on the device, which graphs read anew at each step.

A slot that gets another adapter, or none, changes numbers of the table between two steps: the table itself stays where
it is. Line 0 is that of rows without an adapter. The line of a product has the address of the change of its bias, that
of A, and the rows of A; and, for each pair of factors, the address of B, its first output, its outputs, its first row
of A, its rank and the bits of its scale. The line of a norm has the addresses of weight and bias. 0 is no address.
"""

from collections.abc import Iterator

import numpy as np
import torch

from ....program.adapters import RankAdapter, adapted_matrices, expert_matrices, padded_ranks
from ....program.lower import Program
from ....program.own_params import norm_params, own_head
from ...aten.adapted_products import PreparedAdapter
from ...aten.prepared_weights import PreparedWeights
from ..step.step_adapters import LINE


class DeviceAdapters:
    """The slots of a rank.

    Args:
        program: the rank's program.
        weights: its parameters, all of them.
        slots: the number of adapters.
        rank: their largest rank.
        with_experts: whether some may have factors of experts.

    Attributes:
        ranks: the most rows of A beside each weight that may have factors, by its name.
        held: the adapters by slot.
    """

    def __init__(
        self, program: Program, weights: PreparedWeights, slots: int, rank: int, with_experts: bool = False
    ) -> None:
        self._program, self._weights = program, weights
        matrices = [*adapted_matrices(program)]
        if with_experts:
            matrices += [matrix for matrix, _ in expert_matrices(program)]
        self.ranks = {matrix.name: padded_ranks(program, matrix, rank) for matrix in matrices}
        self.held: dict[int, PreparedAdapter] = {}
        self._norms = dict(norm_params(program))
        self._places = {name: place for place, name in enumerate((*self._norms, *self.ranks))}
        self._none = self._lines(PreparedAdapter({}, {}, {}))
        self._table = self._none.unsqueeze(1).repeat(1, slots + 1, 1)
        head = own_head(program)
        self._head = head.name if head else ""

    def lines(self, name: str) -> torch.Tensor:
        """Returns the lines of a weight, or of a norm by the name of its weight: int64 [numbers, LINE]."""
        return self._table[self._places[name]]

    def pack(self, adapter: RankAdapter) -> tuple[PreparedAdapter, torch.Tensor]:
        """Copies an adapter to the device; returns it with its lines. Steps may be computed meanwhile."""
        prepared = PreparedAdapter.of(adapter, self._program, self._weights)
        return prepared, self._lines(prepared)

    @torch.inference_mode()
    def put(self, slot: int, packed: tuple[PreparedAdapter, torch.Tensor]) -> None:
        """Puts a packed adapter into a slot; steps that follow on the device's stream see it."""
        prepared, lines = packed
        self._table[:, slot + 1].copy_(lines)
        self.held[slot] = prepared

    @torch.inference_mode()
    def drop(self, slot: int) -> None:
        """Empties a slot, whose adapter's memory is free for what follows on the device's stream."""
        self._table[:, slot + 1].copy_(self._none)
        self.held.pop(slot, None)

    def has_head(self, slot: int) -> bool:
        """Returns whether the adapter in a slot has a head of its own."""
        return slot in self.held and self._head in self.held[slot].own

    def _lines(self, adapter: PreparedAdapter) -> torch.Tensor:
        """Returns an adapter's lines on the device, int64 [places, LINE]."""
        found = np.zeros((len(self._places), LINE), np.int64)
        for name, place in self._places.items():
            line = [*(self._norm_line(name, adapter) if name in self._norms else _product_line(name, adapter))]
            found[place, : len(line)] = line
        return torch.from_numpy(found).to(self._weights.device)

    def _norm_line(self, weight: str, adapter: PreparedAdapter) -> Iterator[int]:
        for name in filter(None, (weight, self._norms[weight])):
            yield (adapter.own[name] if name in adapter.own else self._weights[name]).data_ptr()


def _product_line(name: str, adapter: PreparedAdapter) -> Iterator[int]:
    yield adapter.changes[name].data_ptr() if name in adapter.changes else 0
    if name in adapter.products:
        factors = adapter.products[name]
        yield from (factors.down.data_ptr(), factors.down.shape[1])
        for up, first_row, first_rank, scale in factors.ups:
            yield from (up.data_ptr(), first_row, up.shape[1], first_rank, up.shape[2])
            yield int(np.float32(scale).view(np.int32))
