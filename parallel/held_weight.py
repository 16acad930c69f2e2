"""Products with a weight however a rank holds it: [F, D], in transposed blocks, or in codes that are widened in blocks.

They are added to a sum that is rounded once to its dtype, so that adapters can join it. Letters: T rows, D in features,
F out features of this rank. `num_transposed` is the number of blocks [D, F / n] of a weight, one below the other; 0 for
a weight [F, D]. A weight in codes is never transposed.
"""

from typing import TypeAlias

import torch

from .coded_weight import CodedWeight
from .products import in_fp32

Weight: TypeAlias = torch.Tensor | CodedWeight


def sum_dtype(factor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which sums of products with a factor are kept until they are rounded."""
    return torch.float32 if in_fp32(factor) else factor.dtype


def add_product(
    total_TF: torch.Tensor, x_TD: torch.Tensor, weight_DF: torch.Tensor, scale: float = 1.0, *, fresh: bool = False
) -> None:
    """Adds scale x W to a sum in place, before the sum is rounded to its dtype; `fresh` overwrites the sum."""
    factors = (x_TD.to(total_TF.dtype), weight_DF.to(total_TF.dtype))
    torch.addmm(total_TF, *factors, beta=0 if fresh else 1, alpha=scale, out=total_TF)


def add_outputs(
    total_TF: torch.Tensor, x_TD: torch.Tensor, weight: Weight, num_transposed: int, *, fresh: bool = False
) -> None:
    """Adds the outputs of a linear layer to a sum; `fresh` overwrites it."""
    if isinstance(weight, CodedWeight):
        for rows, block_FD in weight.row_blocks():
            add_product(total_TF[:, rows], x_TD, block_FD.t(), fresh=fresh)
    elif not num_transposed:
        add_product(total_TF, x_TD, weight.t(), fresh=fresh)
    else:
        for part_TF, block_DF in zip(total_TF.chunk(num_transposed, -1), weight.chunk(num_transposed), strict=True):
            add_product(part_TF, x_TD, block_DF, fresh=fresh)


def add_input_gradient(
    total_TD: torch.Tensor, grad_TF: torch.Tensor, weight: Weight, num_transposed: int, *, fresh: bool = False
) -> None:
    """Adds the gradient of a linear layer's input, by that of its outputs, to a sum; `fresh` overwrites it."""
    if isinstance(weight, CodedWeight):
        for columns, block_FD in weight.column_blocks():
            add_product(total_TD[:, columns], grad_TF, block_FD, fresh=fresh)
    elif not num_transposed:
        add_product(total_TD, grad_TF, weight, fresh=fresh)
    else:
        parts = zip(grad_TF.chunk(num_transposed, -1), weight.chunk(num_transposed), strict=True)
        for number, (part_TF, block_DF) in enumerate(parts):
            add_product(total_TD, part_TF, block_DF.t(), fresh=fresh and not number)


def coded_product(x_ND: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
    """Maps [..., D] to [..., F] by a weight in codes."""
    y_TF = x_ND.new_empty((x_ND[..., 0].numel(), weight.shape[0]), dtype=sum_dtype(x_ND))
    add_outputs(y_TF, x_ND.flatten(0, -2), weight, 0, fresh=True)
    return y_TF.to(x_ND.dtype).view(*x_ND.shape[:-1], -1)


def coded_input_gradient(grad_NF: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
    """Maps the gradient [..., F] of `coded_product` to that of its input [..., D]."""
    total_TD = grad_NF.new_empty((grad_NF[..., 0].numel(), weight.shape[1]), dtype=sum_dtype(grad_NF))
    add_input_gradient(total_TD, grad_NF.flatten(0, -2), weight, 0, fresh=True)
    return total_TD.to(grad_NF.dtype).view(*grad_NF.shape[:-1], -1)
