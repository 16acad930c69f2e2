"""The cache of either backend as plain arrays, and its formats in numpy, in fp64."""

from ctypes import POINTER, c_uint8, cast
from typing import Final

import numpy as np
import torch

from tk.infer.backends.aten.model_runner import ModelRunner
from tk.infer.backends.native.model_runner import NativeRunner
from tk.infer.backends.native.packing import pair_bytes
from tk.infer.backends.native.structures import PANEL, Format
from tk.infer.kv_formats import hadamard_size
from tk.infer.scheduling.step_plan import Array

NUMPY: Final = {"fp32": "<f4", "bf16": "<u2", "fp16": "<f2", "fp8": "u1", "int8": "i1"}
SIDE_BY_SIDE: Final = ("bf16", "int8")  # formats with the two values of a pair side by side

Parts = tuple[Array, ...]  # elements [blocks, kv heads, block_size, E] first, bf16 and fp8 as bits; then scales


def hadamard(x: Array) -> Array:
    """Transforms [..., E] in blocks, as a product with Sylvester's matrix."""
    size = hadamard_size(x.shape[-1])
    matrix: Array = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks: Array = x.astype(np.float64).reshape(*x.shape[:-1], -1, size) @ matrix / np.sqrt(size)
    return blocks.reshape(x.shape)


def in_aten(made: ModelRunner, layer: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the parts of the keys and of the values of a layer; what is written to them is stored."""
    bits = {torch.bfloat16: torch.int16}
    pages = made._cache._keys[layer], made._cache._values[layer]
    keys, values = ([part.view(bits.get(part.dtype, part.dtype)) for part in each.parts] for each in pages)
    return keys, values


def in_native(made: NativeRunner, layer: int = 0) -> tuple[Parts, Parts]:
    """Returns copies of the parts of the keys and of the values of a layer."""
    model = made._model
    bytes_ = np.ctypeslib.as_array(
        cast(model.cache + layer * model.layer_bytes, POINTER(c_uint8)), (model.layer_bytes,)
    )
    pages = bytes_.reshape(-1, 2, model.kv_heads, model.page_bytes)
    format_ = Format(model.kv_format)
    return _parts(made, pages[:, 0], format_, False), _parts(made, pages[:, 1], format_, True)


def _parts(made: NativeRunner, pages: Array, format_: Format, values: bool) -> Parts:
    """Returns the parts of pages [blocks, kv heads, bytes]; `values` says whether pairs run along the tokens."""
    dim, size = made._model.head_dim, made._model.block_size
    lines, columns = (size, -(-dim // PANEL) * PANEL) if values else (dim, size)
    panels, pairs = columns // PANEL, lines // 2
    name = format_.name.lower()
    data = np.ascontiguousarray(pages[..., : panels * pairs * pair_bytes(format_)]).view(NUMPY[name])
    if name in SIDE_BY_SIDE:
        both = data.reshape(*pages.shape[:2], panels, pairs, PANEL, 2).transpose(0, 1, 3, 5, 2, 4)
    else:
        both = data.reshape(*pages.shape[:2], panels, pairs, 2, PANEL).transpose(0, 1, 3, 4, 2, 5)
    elements = both.reshape(*pages.shape[:2], lines, columns)
    elements = elements[..., :dim] if values else elements.swapaxes(2, 3)
    scales = np.ascontiguousarray(pages[..., made._model.scale_offset :]).view("<f4")
    return (elements, scales[..., :size]) if name == "int8" else (elements,)
