"""The paged KV cache of one rank.

A page, [kv head, block_size, head dim], holds the keys or values of one block. int8 pages have one symmetric fp32 scale
per token and kv head, so a token is quantized once, when it is appended, and later tokens never change it. Attention
always reads the stored values, even for the chunk that was just appended.
"""

from typing import Final

import torch

from ....parallel.torch_dtypes import torch_dtype
from ...options import INT8

_LARGEST: Final = 127.0  # the largest int8 value of a symmetric range
_TINY: Final = 1e-30  # the least scale, so that a vector of zeros is not divided by zero


def page_dtype(kv_dtype: str) -> torch.dtype:
    """Returns the dtype of a page, by its name in `EngineOptions`."""
    return torch.int8 if kv_dtype == INT8 else torch_dtype(kv_dtype)


def quantize(x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes fp32 [..., E] to int8 [..., E] and fp32 scales [...], so that |x - q * scale| <= scale / 2."""
    scale_N = (x_NE.abs().amax(dim=-1) / _LARGEST).clamp_min(_TINY)
    return torch.round(x_NE / scale_N.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST).to(torch.int8), scale_N


class _Pages:
    """Keys or values of one layer: [blocks, kv heads, block_size, head_dim]; int8 has scales without the last dim."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.data = torch.zeros(shape, dtype=dtype)
        self.scales = torch.zeros(shape[:3]) if dtype == torch.int8 else None

    def wipe(self, blocks: torch.Tensor) -> None:
        """Zeroes blocks of the cache."""
        self.data.index_fill_(0, blocks, 0)
        if self.scales is not None:
            self.scales.index_fill_(0, blocks, 0)

    def write(self, lines: torch.Tensor, x_NE: torch.Tensor) -> None:
        """Stores vectors at lines, the flat indexes of (block, head, offset)."""
        if self.scales is None:
            values = x_NE.to(self.data.dtype)
        else:
            values, scale_N = quantize(x_NE.float())
            self.scales.view(-1).index_copy_(0, lines, scale_N)
        self.data.view(-1, self.data.shape[-1]).index_copy_(0, lines, values)

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Returns P pages as fp32 [P, block_size, E]; `pages` are flat indexes of (block, head)."""
        x_PBE = self.data.flatten(0, 1).index_select(0, pages).float()
        if self.scales is not None:
            x_PBE *= self.scales.flatten(0, 1).index_select(0, pages).unsqueeze(-1)
        return x_PBE


class KVCache:
    """Keys and values of every layer.

    Args:
        num_layers: the number of decoder layers.
        num_blocks: the number of blocks that the scheduler allocates; one more, the null block 0, stays zero.
        num_kv_heads: the number of kv heads on this rank.
        block_size: the number of tokens of a block.
        head_dim: the number of elements of a key or value.
        dtype_name: fp32, bf16, fp16 or int8.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype_name: str
    ) -> None:
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
        dtype = page_dtype(dtype_name)
        self._keys = [_Pages(shape, dtype) for _ in range(num_layers)]
        self._values = [_Pages(shape, dtype) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all pages and scales."""
        pages = (*self._keys, *self._values)
        return sum(p.data.nbytes + (0 if p.scales is None else p.scales.nbytes) for p in pages)

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
            if len(begun):
                pages.wipe(begun)
            pages.write(lines, x_THE.reshape(-1, self.head_dim))

    def read(self, layer: int, pages: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of tiles of `num_blocks` blocks, each fp32 [tiles * kv heads, tile tokens, E]."""
        shape = (-1, num_blocks * self.block_size, self.head_dim)
        return self._keys[layer].read(pages).view(shape), self._values[layer].read(pages).view(shape)
