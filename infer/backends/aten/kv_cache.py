"""The paged KV cache of one rank.

A page, [kv head, block_size, head dim], holds the keys or values of one block. A token is quantized once, from full
precision, when it is appended, and later tokens never change it. Attention always reads the stored values, even for the
chunk that was just appended.
"""

import torch

from ...kv_formats import kv_format
from .hadamard import hadamard
from .pages import make_pages


class KVCache:
    """Keys and values of every layer.

    Args:
        num_layers: the number of decoder layers.
        num_blocks: the number of blocks that the scheduler allocates; one more, the null block 0, stays zero.
        num_kv_heads: the number of kv heads on this rank.
        block_size: the number of tokens of a block.
        head_dim: the number of elements of a key or value.
        dtype: the name of its format (see `KV_FORMATS`).
    """

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str
    ) -> None:
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
        self._format = kv_format(dtype)
        self._keys = [make_pages(shape, self._format.keys) for _ in range(num_layers)]
        self._values = [make_pages(shape, self._format.values) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all pages and scales."""
        return sum(part.nbytes for pages in (*self._keys, *self._values) for part in pages.parts)

    def lines(self, slots_T: torch.Tensor) -> torch.Tensor:
        """Returns the lines of the tokens' vectors for `append`, one per token and kv head; slots as in StepPlan."""
        block_T1, offset_T1 = (slots_T // self.block_size).unsqueeze(-1), (slots_T % self.block_size).unsqueeze(-1)
        heads = torch.arange(self.num_kv_heads)
        return ((block_T1 * self.num_kv_heads + heads) * self.block_size + offset_T1).flatten()

    def begun(self, slots_T: torch.Tensor) -> torch.Tensor:
        """Returns the blocks whose first slot is among these; `append` first clears them of an earlier owner's data."""
        return slots_T[slots_T % self.block_size == 0] // self.block_size

    def pages(self, blocks_PN: torch.Tensor) -> torch.Tensor:
        """Returns the pages of P tiles of N blocks each, ordered (P, kv head, N), for `read`."""
        heads_H1 = torch.arange(self.num_kv_heads).unsqueeze(-1)
        return (blocks_PN.unsqueeze(1) * self.num_kv_heads + heads_H1).flatten()

    def append(
        self, layer: int, lines: torch.Tensor, begun: torch.Tensor, k_THE: torch.Tensor, v_THE: torch.Tensor
    ) -> None:
        """Stores the keys and values of T tokens; `lines` and `begun` come from the methods of those names."""
        for pages, x_THE in ((self._keys[layer], k_THE), (self._values[layer], v_THE)):
            for part in pages.parts if len(begun) else ():
                part.index_fill_(0, begun, 0)
            pages.write(lines, self.rotate(x_THE).reshape(-1, self.head_dim))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates [..., E] as the format wants it: keys, values and queries; a second time turns it back."""
        return hadamard(x) if self._format.is_rotated else x

    def read(self, layer: int, pages: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of tiles of `num_blocks` blocks, each fp32 [tiles * kv heads, tile tokens, E]."""
        shape = (-1, num_blocks * self.block_size, self.head_dim)
        return self._keys[layer].read(pages).view(shape), self._values[layer].read(pages).view(shape)
