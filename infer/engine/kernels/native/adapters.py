"""The adapters of a rank in the hands of the kernels: for each operation an array of structures, one per slot."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from ctypes import Array as CArray
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from .....core.casts import Array
from .....core.integers import round_up
from ...program.adapters import RankAdapter, UpFactor, WeightAdapter
from ...program.lower import Program
from ...program.operations import Multiply, RunExperts
from ...program.own_params import linear_biases, norm_params, own_head
from .binding.structures import PANEL, NormVectors, PackedAdapter, PackedMatrix
from .packing import PackedWeights, Stack, pack, padded_vector


@dataclass(frozen=True, slots=True, eq=False)
class PackedRankAdapter:
    """An adapter as the kernels read it.

    Attributes:
        products: what it adds to the products with weights, by their names.
        norms: the vectors of norms, by the names of their weights.
        head: its own head, if it has one.
        memory: what the structures point to.
    """

    products: Mapping[str, PackedAdapter] = field(default_factory=dict)
    norms: Mapping[str, NormVectors] = field(default_factory=dict)
    head: PackedMatrix = field(default_factory=PackedMatrix)
    memory: Sequence[Array] = ()


EMPTY: Final = PackedRankAdapter()


class AdapterSlots:
    """The slots of a rank; empty ones add nothing.

    Args:
        program: the rank's program.
        weights: its parameters, all of them.
        count: the number of slots.
    """

    def __init__(self, program: Program, weights: PackedWeights, count: int) -> None:
        self._weights, self._biases = weights, linear_biases(program)
        self._slices = dict(_weights_with_slices(program)) if count else {}
        self._arrays: dict[str, CArray[PackedAdapter]] = {name: (PackedAdapter * count)() for name in self._slices}
        self._norms = dict(norm_params(program)) if count else {}
        self._vectors: dict[str, CArray[NormVectors]] = {name: (NormVectors * count)() for name in self._norms}
        self._head, self._heads = own_head(program) if count else None, (PackedMatrix * count)()
        self._held: dict[int, PackedRankAdapter] = {}  # by slot, as long as its structures point to their memory

    def address(self, weight: str) -> int | None:
        """Returns the address of a weight's array; None if there are no slots."""
        return ctypes.addressof(self._arrays[weight]) if self._arrays else None

    def vectors_address(self, norm: str) -> int | None:
        """Returns the address of a norm's array, by the name of its weight; None if there are no slots."""
        return ctypes.addressof(self._vectors[norm]) if norm in self._vectors else None

    def heads_address(self) -> int | None:
        """Returns the address of the array of heads; None if there are no slots, or the model's is tied."""
        return ctypes.addressof(self._heads) if self._head else None

    def pack(self, adapter: RankAdapter) -> PackedRankAdapter:
        """Packs an adapter; steps may be computed meanwhile."""
        memory: list[Array] = []
        products = {name: self._packed(name, adapter, memory) for name in self._arrays}
        norms = {
            weight: NormVectors(*(self._vector(name, adapter.own, memory) for name in (weight, offset)))
            for weight, offset in self._norms.items()
        }
        head = PackedMatrix() if self._head is None else self._packed_head(self._head.name, adapter.own, memory)
        return PackedRankAdapter(products, norms, head, memory)

    def put(self, slot: int, packed: PackedRankAdapter) -> None:
        """Puts a packed adapter into a slot, in place of the one that it had; no step is computed meanwhile."""
        for name, array in self._arrays.items():
            array[slot] = packed.products.get(name, PackedAdapter())
        for weight, vectors in self._vectors.items():
            vectors[slot] = packed.norms.get(weight, NormVectors())
        self._heads[slot] = packed.head
        self._held[slot] = packed

    def _packed(self, name: str, adapter: RankAdapter, memory: list[Array]) -> PackedAdapter:
        """Returns what an adapter adds to the product with a weight."""
        packed = PackedAdapter()
        if name in adapter.beside:
            self._pack_factors(packed, adapter.beside[name], self._slices[name], memory)
        bias = self._biases.get(name, "")
        if bias in adapter.own:
            change = self._padded(bias, adapter.own)
            change -= self._weights.vectors[bias]
            memory.append(change)
            packed.bias = change.ctypes.data
        return packed

    def _pack_factors(self, packed: PackedAdapter, factors: WeightAdapter, slices: int, memory: list[Array]) -> None:
        count, inputs = factors.num_experts, factors.down.shape[1]
        ranks = len(factors.down) // count
        scales = np.zeros(round_up(ranks, PANEL), np.float32)
        for up in factors.ups:
            scales[up.first_rank : up.first_rank + up.rank] = up.scale
        memory.append(scales)
        packed.down = self._pack(Stack(count, inputs, ranks, slices=slices), factors.down, memory)
        packed.scales, packed.pairs = scales.ctypes.data, len(factors.ups)
        for place, up in enumerate(factors.ups):
            self._pack_up(packed, place, up, count, memory)

    def _pack_up(self, packed: PackedAdapter, place: int, up: UpFactor, count: int, memory: list[Array]) -> None:
        others = up.first_row % PANEL  # rows before it in its first panel
        rows = np.pad(up.values.reshape(count, -1, up.rank), ((0, 0), (others, 0), (0, 0)))
        packed.ups[place].matrix = self._pack(Stack(count, up.rank, rows.shape[1]), rows, memory)
        packed.ups[place].panel, packed.ups[place].rank = up.first_row // PANEL, up.first_rank

    def _packed_head(self, name: str, own: Mapping[str, Array], memory: list[Array]) -> PackedMatrix:
        if name not in own:
            return PackedMatrix()
        outputs, inputs = own[name].shape
        return self._pack(Stack(1, inputs, outputs), own[name], memory)

    def _pack(self, stack: Stack, values: Array, memory: list[Array]) -> PackedMatrix:
        packed, own = pack(self._weights.kernels, stack, values, self._weights.dtype)
        memory.append(own)
        return packed

    def _vector(self, name: str, own: Mapping[str, Array], memory: list[Array]) -> int | None:
        """Returns the address of an adapter's vector, or of the model's if it has none."""
        if not name:
            return None
        if name not in own:
            return int(self._weights.vectors[name].ctypes.data)
        memory.append(self._padded(name, own))
        return int(memory[-1].ctypes.data)

    def _padded(self, name: str, own: Mapping[str, Array]) -> Array:
        return padded_vector(own[name], self._weights.dtype, name)


def _weights_with_slices(program: Program) -> Iterator[tuple[str, int]]:
    """Yields the weights that may have adapters beside them, with the slices of their products."""
    for operation in program.operations:
        if isinstance(operation, Multiply):
            yield operation.matrix.name, operation.num_slices
        elif isinstance(operation, RunExperts):
            yield from ((operation.gate_up, 1), (operation.down, operation.num_slices))
