"""The adapters of a rank in the hands of the kernels: for each weight an array of `struct adapter`, one per slot."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import Array as CArray
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from .....core.casts import Array
from .....core.dtypes import DType
from .....core.integers import round_up
from ...program.adapters import RankAdapter, UpFactor, WeightAdapter
from ...program.lower import Program
from ...program.operations import Multiply
from .binding.library import Kernels
from .binding.structures import PANEL, PackedAdapter, PackedMatrix
from .packing import Stack, pack


@dataclass(frozen=True, slots=True, eq=False)
class PackedFactors:
    """An adapter as the kernels read it.

    Attributes:
        structures: by the names of weights; those of others are empty.
        memory: what the structures point to.
    """

    structures: Mapping[str, PackedAdapter] = field(default_factory=dict)
    memory: Sequence[Array] = ()


NO_FACTORS: Final = PackedFactors()


class AdapterSlots:
    """The slots of a rank; empty ones add nothing.

    Args:
        program: the rank's program.
        dtype: the dtype of factors.
        kernels: the functions of an instruction set, which pack them.
        count: the number of slots.
    """

    def __init__(self, program: Program, dtype: DType, kernels: Kernels, count: int) -> None:
        self._dtype, self._kernels = dtype, kernels
        products = [each for each in program.operations if isinstance(each, Multiply) and count]
        self._slices = {each.matrix.name: each.num_slices for each in products}
        self._arrays: dict[str, CArray[PackedAdapter]] = {name: (PackedAdapter * count)() for name in self._slices}
        self._held: dict[int, PackedFactors] = {}  # by slot, as long as its structures point to their memory

    def address(self, weight: str) -> int | None:
        """Returns the address of a weight's array; None if there are no slots."""
        return ctypes.addressof(self._arrays[weight]) if self._arrays else None

    def pack(self, adapter: RankAdapter) -> PackedFactors:
        """Packs an adapter; steps may be computed meanwhile."""
        memory: list[Array] = []
        structures = {name: self._packed(each, self._slices[name], memory) for name, each in adapter.items()}
        return PackedFactors(structures, memory)

    def put(self, slot: int, packed: PackedFactors) -> None:
        """Puts a packed adapter into a slot, in place of the one that it had; no step is computed meanwhile."""
        for name, array in self._arrays.items():
            array[slot] = packed.structures.get(name, PackedAdapter())
        self._held[slot] = packed

    def _packed(self, adapter: WeightAdapter, slices: int, memory: list[Array]) -> PackedAdapter:
        ranks, inputs = adapter.down.shape
        scales = np.zeros(round_up(ranks, PANEL), np.float32)
        for up in adapter.ups:
            scales[up.first_rank : up.first_rank + up.rank] = up.scale
        memory.append(scales)
        packed = PackedAdapter(
            down=self._pack(Stack(1, inputs, ranks, slices=slices), adapter.down, memory),
            scales=scales.ctypes.data,
            pairs=len(adapter.ups),
        )
        for place, up in enumerate(adapter.ups):
            self._pack_up(packed, place, up, memory)
        return packed

    def _pack_up(self, packed: PackedAdapter, place: int, up: UpFactor, memory: list[Array]) -> None:
        others = up.first_row % PANEL  # rows before it in its first panel
        rows = np.pad(up.values, ((others, 0), (0, 0)))
        packed.ups[place].matrix = self._pack(Stack(1, up.rank, len(rows)), rows, memory)
        packed.ups[place].panel, packed.ups[place].rank = up.first_row // PANEL, up.first_rank

    def _pack(self, stack: Stack, values: Array, memory: list[Array]) -> PackedMatrix:
        packed, own = pack(self._kernels, stack, values, self._dtype)
        memory.append(own)
        return packed
