"""The launches of kernels of rows that the gate compiles: norms, gates, products and samples of usual sizes."""

from functools import partial
from typing import Final

import torch

from tk.core.quantization import Grouping
from tk.infer.engine.kernels.triton.rows.fixed_products import multiply_fixed
from tk.infer.engine.kernels.triton.rows.launched_products import multiply_rows, multiply_tiles
from tk.infer.engine.kernels.triton.rows.low_rank import add_adapters
from tk.infer.engine.kernels.triton.rows.norms import OwnVectors, add_norm, gate
from tk.infer.engine.kernels.triton.rows.samples import advance, sample
from tk.infer.engine.kernels.triton.step.device_tables import ExpertPairs, RowOptions
from tk.infer.engine.kernels.triton.step.step_adapters import LINE, StepAdapters
from tk.infer.engine.kernels.triton.step.step_columns import DECODE_COLUMNS, FLOAT_COLUMNS, ROW_COLUMNS
from tk.parallel.coded_weight import CodedWeight
from tk.tests.infer.engine.kernels.triton.gate_case import GateCase

META: Final = torch.device("meta")
ROWS, HIDDEN, INNER, VOCAB, EXPERTS = 16, 4096, 11008, 151_936, 8


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def _rows(dtype: torch.dtype) -> None:
    hidden_TD, vector_D = _empty(ROWS, HIDDEN, dtype=dtype), _empty(HIDDEN, dtype=dtype)
    add_norm(hidden_TD, (hidden_TD, None), vector_D, None, 1e-5)
    add_norm(hidden_TD, (hidden_TD, vector_D), vector_D, vector_D, 1e-5)
    gate(_empty(ROWS, 2 * INNER, dtype=dtype), "swiglu")
    gate(_empty(ROWS, INNER, dtype=dtype), "gelu_new")


def _weight(bits: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | CodedWeight:
    if not bits:
        return _empty(rows, columns, dtype=dtype)
    grouping = Grouping(bits, 128 if bits == 8 else 32)
    groups, kind = columns // grouping.columns, torch.float32 if bits == 8 else torch.bfloat16
    codes = _empty(rows, groups, grouping.columns * bits // 8, dtype=torch.uint8)
    minima = None if bits == 8 else _empty(rows, groups)
    return CodedWeight(grouping, codes, _empty(rows, groups, dtype=kind), minima, dtype)


def _products(bits: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x_MK, weight = _empty(ROWS, HIDDEN, dtype=dtype), _weight(bits, EXPERTS * INNER, HIDDEN, dtype)
    pairs = ExpertPairs(*(_empty(count, dtype=torch.int32) for count in (ROWS, EXPERTS)))
    multiply_rows(x_MK, weight, is_gated=True)
    multiply_tiles(x_MK, weight, pairs=pairs, size=64)


def _adapters(dtype: torch.dtype) -> None:
    x_TD, sums_TF = _empty(ROWS, HIDDEN, dtype=dtype), _empty(ROWS, INNER, dtype=torch.float32)
    adapters, lines = StepAdapters.each(_empty(ROWS, dtype=torch.int32)), _empty(5, LINE, dtype=torch.int64)
    add_adapters(x_TD, sums_TF, lines, 32, adapters.tiles)
    vector_D = _empty(HIDDEN, dtype=dtype)
    add_norm(x_TD, (x_TD, None), vector_D, None, 1e-5, OwnVectors(adapters.numbers, lines))


def _fixed(dtype: torch.dtype) -> None:
    weight_NK, bias_N = _empty(INNER, HIDDEN, dtype=dtype), _empty(INNER, dtype=dtype)
    for rows, rounds in ((1, True), (1, False), (512, True)):
        multiply_fixed(_empty(rows, HIDDEN, dtype=dtype), weight_NK, bias_N, rounds)


def _samples() -> None:
    number, share = (_empty(ROWS, dtype=dtype) for dtype in (torch.int32, torch.float32))
    columns = {name: share if name in FLOAT_COLUMNS else number for name in ROW_COLUMNS}
    sample(_empty(ROWS, VOCAB, dtype=torch.float32), RowOptions(columns))
    decoding, tables = (_empty(*shape, dtype=torch.int32) for shape in ((len(DECODE_COLUMNS), ROWS), (ROWS, 256)))
    advance(decoding, tables, number, 32)


CASES: Final[dict[str, GateCase]] = {
    "rows, bf16": GateCase(partial(_rows, torch.bfloat16)),
    "products of int8": GateCase(partial(_products, 8)),
    "products of int4": GateCase(partial(_products, 4)),
    "products of experts": GateCase(partial(_products, 0)),
    "adapters": GateCase(partial(_adapters, torch.bfloat16)),
    "fixed products": GateCase(partial(_fixed, torch.bfloat16)),
    "fixed products, fp32": GateCase(partial(_fixed, torch.float32)),
    "samples": GateCase(_samples),
}
