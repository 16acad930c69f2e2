"""The pages of the cache on torch: the keys or the values of one layer, in one of the formats."""

import math
from typing import Final

import numpy as np
import torch

from .....core.dtypes import FP8_E4M3
from .....parallel.torch_dtypes import torch_dtype
from ...kv_formats import FP8, GROUP, INT4, INT8, VectorFormat

CPU: Final = torch.device("cpu")
_LARGEST: Final = 127.0  # the largest int8 value of a symmetric range
_LARGEST_FP8: Final = 448.0  # larger values are stored as this one
_TINY: Final = 1e-30  # the least scale, so that a vector of zeros is not divided by zero
_LARGEST_FP16, _TINY_FP16 = 65504.0, 2.0**-24


def round_to(x: torch.Tensor, format_: VectorFormat) -> torch.Tensor:
    """Rounds to a format of floats; returns torch's dtype of that format."""
    if format_ == FP8:
        return x.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch_dtype(FP8_E4M3))
    return x.to(torch_dtype(format_.name))


def quantize(x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes fp32 [..., E] to int8 [..., E] and fp32 scales [...], so that |x - q * scale| <= scale / 2."""
    scale_N = (x_NE.abs().amax(dim=-1) / _LARGEST).clamp_min(_TINY)
    return torch.round(x_NE / scale_N.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST).to(torch.int8), scale_N


def quantize_to_4_bits(x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes fp32 [..., E] to codes of 0..15 (uint8), and fp16 scales and zeros [..., groups]."""
    parts = x_NE.split(GROUP, dim=-1)
    lowest, highest = (torch.stack([part.aminmax(dim=-1)[i] for part in parts], dim=-1) for i in range(2))
    nothing = highest - highest  # NaN where an element is not finite
    zeros = (lowest.clamp(-_LARGEST_FP16, _LARGEST_FP16) + nothing).half()
    scales = ((highest - zeros.float()) / 15).clamp(_TINY_FP16, _LARGEST_FP16).half()
    scale_NE, zero_NE = (_per_element(each, x_NE.shape[-1]) for each in (scales, zeros))
    return torch.round((x_NE - zero_NE) / scale_NE).clamp_(0, 15).to(torch.uint8), scales, zeros


def _per_element(of_groups: torch.Tensor, head_dim: int) -> torch.Tensor:
    return of_groups.float().repeat_interleave(GROUP, dim=-1)[..., :head_dim]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros; on a CPU the system commits them page by page as they are written, where torch.zeros would write
    all of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class FloatPages:
    """Floats: [blocks, kv heads, block_size, E]."""

    def __init__(self, shape: tuple[int, int, int, int], format_: VectorFormat, device: torch.device) -> None:
        self._format = format_
        self._data = _zeros(shape, round_to(torch.zeros(1), format_).dtype, device)
        # torch neither gathers nor scatters 8-bit floats
        self._stored = self._data.view(torch.uint8) if format_ == FP8 else self._data
        self.parts: tuple[torch.Tensor, ...] = (self._stored,)

    def write(self, lines: torch.Tensor, x_NE: torch.Tensor) -> None:
        """Stores vectors at lines, the flat indexes of (block, head, offset)."""
        values = round_to(x_NE, self._format).view(self._stored.dtype)
        self._stored.view(-1, self._stored.shape[-1]).index_copy_(0, lines, values)

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Returns P pages as fp32 [P, block_size, E]; `pages` are flat indexes of (block, head)."""
        return self._stored.flatten(0, 1).index_select(0, pages).view(self._data.dtype).float()


class Int8Pages:
    """int8: [blocks, kv heads, block_size, E], with one symmetric fp32 scale for each vector."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self._data, self._scales = _zeros(shape, torch.int8, device), _zeros(shape[:3], torch.float32, device)
        self.parts: tuple[torch.Tensor, ...] = (self._data, self._scales)

    def write(self, lines: torch.Tensor, x_NE: torch.Tensor) -> None:
        """See `FloatPages.write`."""
        values, scale_N = quantize(x_NE.float())
        self._scales.view(-1).index_copy_(0, lines, scale_N)
        self._data.view(-1, self._data.shape[-1]).index_copy_(0, lines, values)

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """See `FloatPages.read`."""
        x_PBE = self._data.flatten(0, 1).index_select(0, pages).float()
        return x_PBE.mul_(self._scales.flatten(0, 1).index_select(0, pages).unsqueeze(-1))


class Int4Pages:
    """4 bits: bytes of two elements, the first one low, [blocks, kv heads, block_size, E / 2], scales and zeros."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self._head_dim = shape[-1]
        self._bytes = _zeros((*shape[:3], (shape[-1] + 1) // 2), torch.uint8, device)
        groups = (*shape[:3], (shape[-1] + GROUP - 1) // GROUP)
        self._scales, self._zeros = (_zeros(groups, torch.float16, device) for _ in range(2))
        self.parts: tuple[torch.Tensor, ...] = (self._bytes, self._scales, self._zeros)

    def write(self, lines: torch.Tensor, x_NE: torch.Tensor) -> None:
        """See `FloatPages.write`."""
        codes, scales, zeros = quantize_to_4_bits(x_NE.float())
        padded: torch.Tensor = torch.nn.functional.pad(codes, (0, self._head_dim % 2))
        both = padded[..., 0::2] | padded[..., 1::2] << 4
        for part, values in zip(self.parts, (both, scales, zeros), strict=True):
            part.view(-1, part.shape[-1]).index_copy_(0, lines, values)

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """See `FloatPages.read`."""
        both, scales, zeros = (part.flatten(0, 1).index_select(0, pages) for part in self.parts)
        codes = torch.stack((both & 15, both >> 4), dim=-1).flatten(-2)[..., : self._head_dim]
        scale_PBE, zero_PBE = (_per_element(each, self._head_dim) for each in (scales, zeros))
        return codes.float().mul_(scale_PBE).add_(zero_PBE)


Pages = FloatPages | Int8Pages | Int4Pages


def make_pages(shape: tuple[int, int, int, int], format_: VectorFormat, device: torch.device) -> Pages:
    """Returns zeroed pages: [blocks, kv heads, block_size, E]."""
    if format_ == INT8:
        return Int8Pages(shape, device)
    return Int4Pages(shape, device) if format_ == INT4 else FloatPages(shape, format_, device)
