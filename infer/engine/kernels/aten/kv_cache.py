"""The paged KV cache of one rank.

A page, [kv head, block_size, head dim], holds the keys or values of one block. A token is quantized once, from full
precision, when it is appended, and later tokens never change it. Attention always reads the stored values, even for the
chunk that was just appended. Vectors of 4 bits have twins in int8, in blocks of their own (see `KVFormat.num_twins`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...kv_formats import INT4, INT8, hadamard_size, kv_format
from .pages import CPU, Pages, make_pages


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Transforms [..., E] to fp32 [..., E], in blocks of `hadamard_size(E)`; a second time turns it back.

    Sums of pairs are added to sums of pairs (the fast Walsh-Hadamard transform), so a vector's bits depend on it alone.
    """
    size = hadamard_size(x.shape[-1])
    out = x.float()
    for half in (1 << i for i in range(size.bit_length() - 1)):
        first, second = out.unflatten(-1, (-1, 2, half)).unbind(-2)
        out = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    result: torch.Tensor = out * size**-0.5
    return result


class LayerParts(NamedTuple):
    """The tensors of a layer's pages (`Pages.parts`), for other kernels; of twins that there are not, none."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    key_twins: tuple[torch.Tensor, ...]
    value_twins: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the vectors of a step's tokens are stored.

    Attributes:
        lines: their flat indexes of (block, head, offset), one per token and kv head.
        begun: the blocks whose first slot is among them: an earlier owner's data is cleared.
    """

    lines: torch.Tensor
    begun: torch.Tensor


class KVCache:
    """Keys and values of every layer.

    Args:
        num_layers: the number of decoder layers.
        num_blocks: the number of blocks that the scheduler allocates; one more, the null block 0, stays zero.
        num_kv_heads: the number of kv heads on this rank.
        block_size: the number of tokens of a block.
        head_dim: the number of elements of a key or value.
        dtype: the name of its format (see `KV_FORMATS`).
        num_twins: see `CacheShape`.
        device: where it lies.

    Attributes:
        has_twins: whether `read_twins` may be called.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: str,
        num_twins: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
        self._format = kv_format(dtype)
        self._keys = [make_pages(shape, self._format.keys, device) for _ in range(num_layers)]
        self._values = [make_pages(shape, self._format.values, device) for _ in range(num_layers)]
        self.has_twins = self._format.num_twins > 0
        own_twins = torch.arange(num_blocks + 1, device=device)
        self._twin_of = torch.zeros_like(own_twins) if num_twins else own_twins
        # the block of each twin that a plan has assigned
        self._owner = torch.zeros(num_twins + 1, dtype=torch.int64, device=device)
        layers, shape = range(num_layers if self.has_twins else 0), ((num_twins or num_blocks) + 1, *shape[1:])
        self._key_twins = [make_pages(shape, INT8, device) for _ in layers if self._format.keys == INT4]
        self._value_twins = [make_pages(shape, INT8, device) for _ in layers]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all pages, scales and twins."""
        kinds = (*self._keys, *self._values, *self._key_twins, *self._value_twins)
        return sum(part.nbytes for pages in kinds for part in pages.parts)

    @property
    def rotated_size(self) -> int:
        """The size of the blocks in which keys, values and queries are rotated; 1: they are not."""
        return hadamard_size(self.head_dim) if self._format.is_rotated else 1

    @property
    def twin_of(self) -> torch.Tensor:
        """The twin of each block, 0 for none: int64 [blocks]; it stays the same tensor."""
        return self._twin_of

    def parts(self, layer: int) -> LayerParts:
        """Returns the tensors of a layer."""
        kinds = (self._keys, self._values, self._key_twins, self._value_twins)
        return LayerParts(*(kind[layer].parts if kind else () for kind in kinds))

    def assign(self, twins_N2: torch.Tensor, forks_N2: torch.Tensor) -> None:
        """Assigns twins to blocks, and the content of others to blocks and to their twins: see `RunningPlan`."""
        shared, own = forks_N2.unbind(-1)
        source = self._twin_of[shared]  # before it is assigned to another
        if len(twins_N2):
            self._assign_twins(twins_N2)
        if len(own):
            _copy((*self._keys, *self._values), shared, own)
            _copy((*self._key_twins, *self._value_twins), source, self._twin_of[own])

    def _assign_twins(self, twins_N2: torch.Tensor) -> None:
        """Assigns twins to blocks, which earlier owners lose unless they have others by now."""
        blocks, twins = twins_N2.unbind(-1)
        earlier = self._owner[twins]
        self._twin_of[torch.where(self._twin_of[earlier] == twins, earlier, 0)] = 0  # block 0 never has another twin
        self._owner[twins], self._twin_of[blocks] = blocks, twins

    def places(self, slots_T: torch.Tensor, begun_N: torch.Tensor) -> tuple[Places, Places | None]:
        """Returns the places of tokens and of their twins, if there are any, for `append`; after `assign`.

        Args:
            slots_T: int64, as in RunningPlan.
            begun_N: int64, the blocks whose first slot is among them.
        """
        block_T, offset_T = slots_T // self.block_size, slots_T % self.block_size
        places = self._places(block_T, offset_T, begun_N)
        if not self.has_twins:
            return places, None
        return places, self._places(self._twin_of[block_T], offset_T, self._twin_of[begun_N])

    def _places(self, block_T: torch.Tensor, offset_T: torch.Tensor, begun_N: torch.Tensor) -> Places:
        heads = torch.arange(self.num_kv_heads, device=self.device)
        lines = (block_T.unsqueeze(-1) * self.num_kv_heads + heads) * self.block_size + offset_T.unsqueeze(-1)
        return Places(lines.flatten(), begun_N)

    def pages(self, blocks_PN: torch.Tensor) -> torch.Tensor:
        """Returns the pages of P tiles of N blocks each, ordered (P, kv head, N), for `read`."""
        heads_H1 = torch.arange(self.num_kv_heads, device=self.device).unsqueeze(-1)
        return (blocks_PN.unsqueeze(1) * self.num_kv_heads + heads_H1).flatten()

    def twins(self, blocks_PN: torch.Tensor) -> torch.Tensor:
        """Returns the pages of the blocks' twins, those of block 0 for blocks without one, for `read_twins`."""
        return self.pages(self._twin_of[blocks_PN])

    def append(
        self, layer: int, places: tuple[Places, Places | None], k_THE: torch.Tensor, v_THE: torch.Tensor
    ) -> None:
        """Stores the keys and values of T tokens in a layer; `places` come from the method of that name."""
        where, twins = places
        key_NE, value_NE = (self.rotate(x_THE).reshape(-1, self.head_dim) for x_THE in (k_THE, v_THE))
        _write(self._keys[layer], where, key_NE)
        _write(self._values[layer], where, value_NE)
        if twins is not None:
            _write(self._value_twins[layer], twins, value_NE)
            if self._key_twins:
                _write(self._key_twins[layer], twins, key_NE)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates [..., E] as the format wants it: keys, values and queries; a second time turns it back."""
        return hadamard(x) if self._format.is_rotated else x

    def read(self, layer: int, pages: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of tiles of `num_blocks` blocks, each fp32 [tiles * kv heads, tile tokens, E]."""
        shape = (-1, num_blocks * self.block_size, self.head_dim)
        return self._keys[layer].read(pages).view(shape), self._values[layer].read(pages).view(shape)

    def read_twins(self, layer: int, pages: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns keys and values as `read` does, from their twins; None for keys without twins."""
        shape = (-1, num_blocks * self.block_size, self.head_dim)
        keys = self._key_twins[layer].read(pages).view(shape) if self._key_twins else None
        return keys, self._value_twins[layer].read(pages).view(shape)


def _copy(kinds: Iterable[Pages], blocks: torch.Tensor, to: torch.Tensor) -> None:
    for part in (part for pages in kinds for part in pages.parts):
        part[to] = part[blocks]


def _write(pages: Pages, places: Places, x_NE: torch.Tensor) -> None:
    for part in pages.parts if len(places.begun) else ():
        part.index_fill_(0, places.begun, 0)
    pages.write(places.lines, x_NE)
