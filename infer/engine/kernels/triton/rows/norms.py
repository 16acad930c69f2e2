"""Kernels of rows: the addition to hidden with the norm of the sum, and the gate of a feed-forward block.

Sums are fp32, in one order for any number of rows. Values are rounded to the dtype of the rows where torch's own
operators round them, so that both backends see the same numbers.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from ......core.integers import ceil_div
from ..step.step_adapters import LINE

_GATE_BLOCK: Final = 1024  # columns of a program


@dataclass(frozen=True, slots=True)
class RowShape:
    """The constants of a kernel of rows.

    Attributes:
        columns: those of a row of results.
        block: those of a program, a power of two.
        is_first: whether the norm is RMSNorm, or the gate SwiGLU.
        line: the numbers of a line of the table of adapters.
    """

    columns: int
    block: int
    is_first: bool
    line: int = 0


class OwnVectors(NamedTuple):
    """The vectors of a norm by adapters, None without: see `run/device_adapters.py`.

    Attributes:
        numbers: that of each row's adapter, int32 [T].
        lines: the norm's lines of the table, int64 [numbers, LINE].
    """

    numbers: Any = None
    lines: Any = None


class _Vectors(NamedTuple):
    weight: Any
    shift: Any
    numbers: Any
    lines: Any


NO_VECTORS: Final = OwnVectors()


@triton.jit
def add_norm_kernel(
    hidden: tl.tensor,
    added: tl.tensor,
    bias: tl.tensor,
    vectors: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Adds a row to hidden, in place, and norms the sum; one program per row, whose columns are one block."""
    place = tl.arange(0, S.block)
    inside = place < S.columns
    at = tl.program_id(0).to(tl.int64) * S.columns + place
    kind = hidden.dtype.element_ty
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        more = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            more += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
            more = more.to(kind).to(tl.float32)
        x = (x + more).to(kind).to(tl.float32)
        tl.store(hidden + at, x.to(kind), mask=inside)
    weight, shift = vectors.weight, vectors.shift
    if vectors.numbers is not None:
        line = vectors.lines + tl.load(vectors.numbers + tl.program_id(0)) * S.line
        weight = tl.load(line).to(tl.pointer_type(kind))
        shift = tl.load(line + 1).to(tl.pointer_type(kind))
    scale = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if S.is_first:
        normed = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / S.columns + eps))
        y = scale * normed.to(kind).to(tl.float32)
    else:
        far = tl.where(inside, x - tl.sum(x, axis=0) / S.columns, 0.0)
        normed = far * (1.0 / tl.sqrt_rn(tl.sum(far * far, axis=0) / S.columns + eps))
        y = normed * scale + tl.load(shift + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(kind), mask=inside)


@triton.jit
def gate_kernel(inner: tl.tensor, out: tl.tensor, S: tl.constexpr) -> None:
    """Writes silu(gate) * up of rows [2 columns], or GELU in its tanh form; programs: (row, block of columns)."""
    place = tl.program_id(1) * S.block + tl.arange(0, S.block)
    inside = place < S.columns
    row = tl.program_id(0).to(tl.int64)
    kind = inner.dtype.element_ty
    if S.is_first:
        at = row * 2 * S.columns + place
        x = tl.load(inner + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + at + S.columns, mask=inside, other=0.0).to(tl.float32)
        y = (x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32) * up
    else:
        x = tl.load(inner + row * S.columns + place, mask=inside, other=0.0).to(tl.float32)
        wide = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        small = tl.exp(-2.0 * tl.abs(wide))  # tanh by an exponential that cannot overflow
        tanh = (1.0 - small) / (1.0 + small)
        y = 0.5 * x * (1.0 + tl.where(wide < 0, -tanh, tanh))
    tl.store(out + row * S.columns + place, y.to(kind), mask=inside)


def add_norm(
    hidden_TD: torch.Tensor,
    added: tuple[torch.Tensor | None, torch.Tensor | None],
    weight_D: torch.Tensor,
    shift_D: torch.Tensor | None,
    eps: float,
    own: OwnVectors = NO_VECTORS,
) -> torch.Tensor:
    """Adds rows and a bias to hidden, in place, and returns the norm of the sum, [T, D].

    Args:
        hidden_TD: the rows that change.
        added: the rows, and the bias of these; None for what there is not.
        weight_D: the weight of the norm.
        shift_D: the bias of LayerNorm; None for RMSNorm.
        eps: the epsilon of the norm.
        own: the vectors of the rows' adapters.
    """
    columns = hidden_TD.shape[1]
    block = int(triton.next_power_of_2(columns))
    rows_TD = None if added[0] is None else added[0].contiguous()
    out_TD = torch.empty_like(hidden_TD)
    shape, vectors = RowShape(columns, block, shift_D is None, LINE), _Vectors(weight_D, shift_D, *own)
    add_norm_kernel[(len(hidden_TD),)](
        hidden_TD, rows_TD, added[1], vectors, out_TD, eps, shape, num_warps=8 if block > 4096 else 4
    )
    return out_TD


def gate(inner_TF: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns the activation of rows (see `Gate`): [T, 2 I] or [T, I] -> [T, I]."""
    is_swiglu = kind == "swiglu"
    columns = inner_TF.shape[1] // (2 if is_swiglu else 1)
    out_TI = inner_TF.new_empty(len(inner_TF), columns)
    block = min(_GATE_BLOCK, int(triton.next_power_of_2(columns)))
    grid = (len(inner_TF), ceil_div(columns, block))
    gate_kernel[grid](inner_TF.contiguous(), out_TI, RowShape(columns, block, is_swiglu))
    return out_TI
