"""Initial weights, a function of logical name and seed alone, so that every layout starts from the same model."""

import hashlib
import math

import torch

from ..core.geometry import Box
from ..core.local_params import LocalParam
from ..core.tensors import TensorSpec
from .decoder import Decoder

BLOCK = 2**20  # the number of elements that one generator draws


def initialize_weights(decoder: Decoder, seed: int) -> None:
    """Fills every parameter in place: norms with ones, biases with zeros, others with noise (`TensorSpec.init`).

    The standard deviation of normal noise is `initializer_range`.
    """
    with torch.no_grad():
        for local in decoder.local_params():
            fill_initial(local, decoder.get_parameter(local.name), seed, decoder.config.initializer_range)


def fill_initial(local: LocalParam, parameter: torch.Tensor, seed: int, std: float) -> None:
    """Fills one parameter in place, and its padding with zeros."""
    flat = parameter.view(-1).zero_()
    for piece in local.pieces:
        values = initial_values(piece.tensor, piece.box, seed, std)
        flat[piece.start : piece.start + piece.box.size].copy_(values.reshape(-1))


def initial_values(spec: TensorSpec, box: Box, seed: int, std: float) -> torch.Tensor:
    """Returns the initial values of a box of a tensor, fp32 on the CPU.

    The tensor's row-major elements are drawn in blocks of 2^20, each from a generator seeded by (seed, name, block).
    A rank draws only the rows that its box touches, without communication. An alias gets its original's values.
    """
    if spec.init in ("ones", "zeros"):
        return torch.full(box.shape, 1.0 if spec.init == "ones" else 0.0)
    if not box.size:
        return torch.empty(box.shape)
    row = math.prod(spec.shape[1:])
    total = math.prod(spec.shape)
    start, stop = box.offset[0] * row, box.end[0] * row
    blocks = range(start // BLOCK, (stop - 1) // BLOCK + 1)
    name = spec.alias or spec.name
    is_normal = spec.init == "normal"
    drawn = torch.cat([_draw(name, seed, block, min(BLOCK, total - block * BLOCK), is_normal) for block in blocks])
    first = start - blocks[0] * BLOCK
    rows = drawn[first : first + stop - start].view(box.shape[0], *spec.shape[1:])
    return rows[(slice(None), *box.slices[1:])] * (std if is_normal else row**-0.5)


def _draw(name: str, seed: int, block: int, size: int, is_normal: bool) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{block}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if is_normal:
        return torch.randn(size, generator=generator)
    return torch.empty(size).uniform_(-1.0, 1.0, generator=generator)
