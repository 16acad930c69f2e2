"""The cache of either backend as plain arrays, and its formats in numpy, in fp64."""

from ctypes import POINTER, c_uint8, cast
from typing import Final

import numpy as np
import torch

from tk.core.casts import Array
from tk.infer.engine.kernels.aten.model_runner import ModelRunner
from tk.infer.engine.kernels.native.binding.structures import PANEL, Format, NativeModel
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.kernels.native.packing import pair_bytes
from tk.infer.engine.kv_formats import hadamard_size
from tk.tests.infer.engine.kernels.native.running import NUM_BLOCKS

NUMPY: Final = {"fp32": "<f4", "bf16": "<u2", "fp16": "<f2", "fp8": "u1", "int8": "i1", "int4": "u1"}
SIDE_BY_SIDE: Final = ("bf16", "int8", "int4")  # formats with the two values of a pair side by side

Parts = tuple[Array, ...]  # elements [blocks, kv heads, block_size, E] first, bf16 and fp8 as bits; then scales


def hadamard(x: Array) -> Array:
    """Transforms [..., E] in blocks, as a product with Sylvester's matrix."""
    size = hadamard_size(x.shape[-1])
    matrix: Array = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks: Array = x.astype(np.float64).reshape(*x.shape[:-1], -1, size) @ matrix / np.sqrt(size)
    return blocks.reshape(x.shape)


def in_aten(made: ModelRunner, layer: int = 0) -> list[list[torch.Tensor]]:
    """Returns the parts of a layer's keys, values, and twins of these in int8; what is written to them is stored."""
    cache, bits = made._cache, {torch.bfloat16: torch.int16}
    kinds = (cache._keys, cache._values, cache._key_twins, cache._value_twins)
    return [[part.view(bits.get(part.dtype, part.dtype)) for part in kind[layer].parts] for kind in kinds if kind]


def in_native(made: NativeRunner, layer: int = 0) -> list[Parts]:
    """Returns copies of the parts that `in_aten` names."""
    model, found = made._model, []
    blocks = _of_layer(model, model.cache, layer, model.layer_bytes)
    for values, pages in enumerate(np.split(blocks, [model.page_bytes[0] * model.kv_heads], axis=1)):
        format_ = Format((model.key_format, model.value_format)[values])
        of_heads = pages.reshape(NUM_BLOCKS + 1, model.kv_heads, -1)
        found.append(_parts(made, of_heads, format_, bool(values), model.scale_offset[values]))
    twinned = [i for i, each in enumerate((model.key_format, model.value_format)) if each == Format.INT4]
    twins = _of_layer(model, model.twins, layer, model.twin_layer_bytes)
    for values, pages in zip(twinned, np.split(twins, max(1, len(twinned)), axis=1), strict=False):
        of_heads = pages.reshape(NUM_BLOCKS + 1, model.kv_heads, -1)
        found.append(_parts(made, of_heads, Format.INT8, bool(values), model.twin_scale_offset))
    return found


def _of_layer(model: NativeModel, address: int, layer: int, size: int) -> Array:
    """Returns a copy of a layer's bytes in all blocks, uint8 [blocks, size]; a block has one layer after the other."""
    if not size:
        return np.zeros((NUM_BLOCKS + 1, 0), np.uint8)
    shape = (NUM_BLOCKS + 1, model.num_layers, size)
    return np.ctypeslib.as_array(cast(address, POINTER(c_uint8)), shape)[:, layer].copy()


def _parts(made: NativeRunner, pages: Array, format_: Format, values: bool, scale_offset: int) -> Parts:
    """Returns the parts of pages [blocks, kv heads, bytes]; `values` says whether pairs run along the tokens."""
    dim, size = made._model.head_dim, made._model.block_size
    lines, columns = (size, -(-dim // PANEL) * PANEL) if values else (dim, size)
    panels, pairs, name = columns // PANEL, lines // 2, format_.name.lower()
    data = np.ascontiguousarray(pages[..., : panels * pairs * pair_bytes(format_)])
    if name == "int4":
        data = np.stack([data & 15, data >> 4], axis=-1)
    data = data.view(NUMPY[name])
    if name in SIDE_BY_SIDE:
        both = data.reshape(*pages.shape[:2], panels, pairs, PANEL, 2).transpose(0, 1, 3, 5, 2, 4)
    else:
        both = data.reshape(*pages.shape[:2], panels, pairs, 2, PANEL).transpose(0, 1, 3, 4, 2, 5)
    elements = both.reshape(*pages.shape[:2], lines, columns)
    elements = elements[..., :dim] if values else elements.swapaxes(2, 3)
    scales = np.ascontiguousarray(pages[..., scale_offset:])
    if name == "int8":
        return elements, scales.view("<f4")[..., :size]
    if name == "int4":
        groups = scales.view("<f2").reshape(*pages.shape[:2], -1, 2, size).transpose(0, 1, 4, 2, 3)
        return elements[..., 0::2] | elements[..., 1::2] << 4, groups[..., 0], groups[..., 1]
    return (elements,)
