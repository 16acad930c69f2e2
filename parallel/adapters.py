"""The products with the factors of low-rank adapters (LoRA, arXiv 2106.09685), beside the product with their weights.

y = W x + scale B A x. The product u = A x is rounded once to the dtype of x; scale B u joins the sum of W x before that
is rounded. Where tensor parallelism splits the input, each rank has a part of the sum over inputs, for A as for W, so
the adapter's product needs no exchange of its own.

torch.compile traces all but the product with the weight, which is an operator of its own.

Letters: N any leading dims, T all of them as one, D in features, F out features of this rank, R the ranks of all
adapters of one parameter, r the rank of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .held_weight import Weight, add_input_gradient, add_outputs, add_product, sum_dtype
from .products import matmul
from .token_noise import TokenNoise


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The part of a parameter that one adapter belongs to.

    Attributes:
        name: the name of its weight's module, without those around it.
        rows: its out features, among those of the parameter.
        ranks: its rows of A, among those of the parameter.
        scale: the factor of its product.
        dropout: the share of inputs that a training step leaves out.
        word: the word of its weight's full name, on which the random numbers of dropout depend; see `word_of`.
        first: the number of this rank's first input feature.
    """

    name: str
    rows: slice
    ranks: slice
    scale: float
    dropout: float = 0.0
    word: torch.Tensor | None = None
    first: int = 0

    def dropped(self, x_TD: torch.Tensor, noise: TokenNoise) -> torch.Tensor:
        """Returns inputs, or their gradient, after dropout."""
        if not self.dropout or self.word is None:
            return x_TD
        return noise.dropped(x_TD, self.dropout, self.word, self.first)


class AdapterFactors(nn.Module):
    """The factors of the adapters of one parameter, uninitialised.

    Args:
        parts: the adapters, in the order of their rows.
        a_RD: A of all adapters, one below the other.
        b: B [F, r] of each adapter, by name.
    """

    def __init__(self, parts: Sequence[AdaptedRows], a_RD: nn.Parameter, b: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.A = a_RD
        self.B = nn.ParameterDict(b)

    def product(self, num_features: int, noise: TokenNoise | None) -> "AdapterProduct":
        """Returns a call of the adapters beside a weight of so many out features; `noise` is that of dropout."""
        b = tuple(self.B[part.name] for part in self.parts)
        drops = noise is not None and any(part.dropout for part in self.parts)
        return AdapterProduct(self.parts, self.A, b, num_features, noise if drops else None)


@dataclass(frozen=True, slots=True)
class AdapterProduct:
    """One call of the adapters of a parameter, outside of autograd.

    Attributes:
        parts: see AdapterFactors.
        a_RD: A of all parts.
        b: B [F, r] of each part.
        num_features: F of the whole parameter.
        noise: the random numbers of dropout; None without it.
    """

    parts: tuple[AdaptedRows, ...]
    a_RD: torch.Tensor
    b: tuple[torch.Tensor, ...]
    num_features: int
    noise: TokenNoise | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """A, then B of each part."""
        return self.a_RD, *self.b

    def down(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Returns u = A x of all parts, [T, R]."""
        x_TD = x_ND.flatten(0, -2)
        if self.noise is None:
            return matmul(x_TD, self.a_RD.t())
        own = [matmul(part.dropped(x_TD, self.noise), self.a_RD[part.ranks].t()) for part in self.parts]
        return torch.cat(own, dim=-1)

    def up(self, u_TR: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns scale B u of all parts in a dtype, [T, F]; zeros where no part has rows."""
        covered = sum(part.rows.stop - part.rows.start for part in self.parts)
        make = u_TR.new_empty if covered == self.num_features else u_TR.new_zeros
        y_TF = make((len(u_TR), self.num_features), dtype=dtype)
        for part, b_Fr in zip(self.parts, self.b, strict=True):
            add_product(y_TF[:, part.rows], u_TR[:, part.ranks], b_Fr.t(), part.scale, fresh=True)
        return y_TF

    def down_gradient(self, grad_NF: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of A x of all parts, [T, R], from that of the output."""
        grad_TF = grad_NF.flatten(0, -2)
        pairs = zip(self.parts, self.b, strict=True)
        return torch.cat([_scaled_product(grad_TF[:, part.rows], b_Fr, part.scale) for part, b_Fr in pairs], dim=-1)

    def input_gradient(self, grad_TR: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the adapters' part of the input's gradient in a dtype, [T, D], from that of A x."""
        total_TD = grad_TR.new_empty((len(grad_TR), self.a_RD.shape[1]), dtype=dtype)
        if self.noise is None:
            add_product(total_TD, grad_TR, self.a_RD, fresh=True)
            return total_TD
        total_TD.zero_()
        for part in self.parts:
            total_TD += part.dropped(matmul(grad_TR[:, part.ranks], self.a_RD[part.ranks]), self.noise)
        return total_TD

    def factor_gradients(
        self, grad_NF: torch.Tensor, grad_TR: torch.Tensor, x_ND: torch.Tensor, u_TR: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of A and of each B, from those of the output and of A x."""
        x_TD, grad_TF = x_ND.flatten(0, -2), grad_NF.flatten(0, -2)
        if self.noise is None:
            grad_RD = matmul(grad_TR.t(), x_TD)
        else:
            own = [matmul(grad_TR[:, part.ranks].t(), part.dropped(x_TD, self.noise)) for part in self.parts]
            grad_RD = torch.cat(own)
        return grad_RD, *(
            _scaled_product(grad_TF[:, part.rows].t(), u_TR[:, part.ranks], part.scale) for part in self.parts
        )


def adapted_product(
    x_ND: torch.Tensor, weight: Weight, num_transposed: int, adapter: AdapterProduct, u_TR: torch.Tensor
) -> torch.Tensor:
    """Maps [..., D] to [..., F] by this rank's weight and its adapters; see `held_weight` for the weight."""
    if torch.compiler.is_compiling() and isinstance(weight, torch.Tensor):
        bounds = [
            bound for part in adapter.parts for each in (part.rows, part.ranks) for bound in (each.start, each.stop)
        ]
        scales = [part.scale for part in adapter.parts]
        y_NF: torch.Tensor = _opaque_product(
            x_ND, weight, num_transposed, u_TR, list(adapter.b), bounds, scales, adapter.num_features
        )
        return y_NF
    y_TF = adapter.up(u_TR, sum_dtype(x_ND))
    add_outputs(y_TF, x_ND.flatten(0, -2), weight, num_transposed)
    return y_TF.to(x_ND.dtype).view(*x_ND.shape[:-1], -1)


@torch.library.custom_op("tk::adapted_product", mutates_args=())
def _opaque_product(
    x_ND: torch.Tensor,
    weight: torch.Tensor,
    num_transposed: int,
    u_TR: torch.Tensor,
    b: Sequence[torch.Tensor],
    bounds: Sequence[int],
    scales: Sequence[float],
    num_features: int,
) -> torch.Tensor:
    """Computes `adapted_product` as torch.compile calls it: traced, it would copy the sum that products join in place.

    Args:
        bounds: the first row, the end of rows, the first rank and the end of ranks of each adapter.
        scales: the scale of each adapter.
    """
    pairs = zip(bounds[::4], bounds[1::4], strict=True), zip(bounds[2::4], bounds[3::4], strict=True)
    found = zip(*pairs, scales, strict=True)
    parts = tuple(AdaptedRows("", slice(*rows), slice(*ranks), scale) for rows, ranks, scale in found)
    return adapted_product(x_ND, weight, num_transposed, AdapterProduct(parts, u_TR, tuple(b), num_features), u_TR)


@_opaque_product.register_fake
def _(
    x_ND: torch.Tensor,
    weight: torch.Tensor,
    num_transposed: int,
    u_TR: torch.Tensor,
    b: Sequence[torch.Tensor],
    bounds: Sequence[int],
    scales: Sequence[float],
    num_features: int,
) -> torch.Tensor:
    return x_ND.new_empty((*x_ND.shape[:-1], num_features))


def adapted_input_gradient(
    grad_NF: torch.Tensor, weight: Weight, num_transposed: int, adapter: AdapterProduct, grad_TR: torch.Tensor
) -> torch.Tensor:
    """Maps the gradient [..., F] of `adapted_product` to that of its input [..., D]."""
    total_TD = adapter.input_gradient(grad_TR, sum_dtype(grad_NF))
    add_input_gradient(total_TD, grad_NF.flatten(0, -2), weight, num_transposed)
    return total_TD.to(grad_NF.dtype).view(*grad_NF.shape[:-1], -1)


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns scale a b, rounded once."""
    total = a.new_empty((len(a), b.shape[1]), dtype=sum_dtype(a))
    add_product(total, a, b, scale, fresh=True)
    return total.to(a.dtype)
