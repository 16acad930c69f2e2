"""The products of adapters beside their weight, against torch's autograd: output and every gradient."""

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tk.parallel.adapters import AdaptedRows, AdapterFactors, adapted_product
from tk.parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from tk.parallel.mesh import ALONE
from tk.parallel.token_noise import TokenNoise, word_of
from tk.parallel.weight_grads import WeightGradQueue, run_deferred
from tk.tests.parallel.test_layers import CPU

INPUTS, BATCH, LENGTH = 8, 2, 5
ROWS = {"q": slice(0, 6), "k": slice(6, 9), "v": slice(9, 12)}
Values = dict[str, torch.Tensor]


def noise() -> TokenNoise:
    rows = torch.arange(BATCH).unsqueeze(1).expand(BATCH, LENGTH)
    return TokenNoise.of(1, rows, torch.arange(LENGTH).expand(BATCH, LENGTH))


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factors(
    names: str, dropout: float = 0.0, dtype: torch.dtype = torch.float32, columns: int = INPUTS
) -> AdapterFactors:
    """Returns the factors of adapters of some of the rows; each has a rank and a scale of its own."""
    ranks = [2 + place for place in range(len(names))]
    ends = list(accumulate(ranks))
    parts = [
        AdaptedRows(name, ROWS[name], slice(end - rank, end), 0.5 * end, dropout, word_of(f"layer.{name}.weight"))
        for name, rank, end in zip(names, ranks, ends, strict=True)
    ]
    b = {
        part.name: nn.Parameter(drawn(part.rows.stop - part.rows.start, rank, seed=rank, dtype=dtype))
        for part, rank in zip(parts, ranks, strict=True)
    }
    return AdapterFactors(parts, nn.Parameter(drawn(ends[-1], columns, seed=9, dtype=dtype)), b)


def expected(x: torch.Tensor, weight: torch.Tensor, adapter: AdapterFactors, mine: TokenNoise | None) -> torch.Tensor:
    """Returns W x + scale B A x by torch's operators, with the mask of dropout as a constant."""
    y = F.linear(x, weight)
    for part in adapter.parts:
        own = x
        if part.dropout and mine is not None:
            with torch.no_grad():
                mask = part.dropped(torch.ones_like(x).flatten(0, -2), mine).view_as(x)
            own = x * mask
        product = F.linear(F.linear(own, adapter.A[part.ranks]), adapter.B[part.name]) * part.scale
        y = y + F.pad(product, (part.rows.start, weight.shape[0] - part.rows.stop))
    return y


def gradients(y: torch.Tensor, x: torch.Tensor, weight: nn.Parameter, adapter: AdapterFactors) -> Values:
    """Returns the gradients of the input, of the weight if it is trained, and of the factors."""
    for tensor in (x, weight, *adapter.parameters()):
        tensor.grad = None
    y.float().mul(drawn(*y.shape, seed=5)).sum().backward()
    named = {"x": x, "weight": weight, **dict(adapter.named_parameters())}
    return {name: each.grad.clone() for name, each in named.items() if each.grad is not None}


CASES: dict[str, dict[str, Any]] = {
    "all rows": {"names": "qkv"},
    "some rows": {"names": "kv"},
    "dropout": {"names": "qv", "dropout": 0.4},
}


@pytest.mark.parametrize("num_transposed", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("of_input", [False, True])
def test_a_column_with_adapters_is_torchs(case: str, num_transposed: int, of_input: bool) -> None:
    adapter = factors(**CASES[case])
    layer = ColumnParallelLinear(
        INPUTS, 12, LayerContext(ALONE, torch.float32, CPU), num_transposed=num_transposed, adapter=adapter
    )
    whole = nn.Parameter(drawn(12, INPUTS, seed=2))
    blocks = [block.t() for block in whole.chunk(num_transposed)] if num_transposed else [whole]
    layer.weight.data = torch.cat([block.detach() for block in blocks])
    layer.weight.requires_grad_(False)
    whole.requires_grad_(False)
    x = drawn(BATCH, LENGTH, INPUTS, seed=1).requires_grad_(of_input)
    for mine in (None, noise()):
        y, wanted = layer(x, mine), expected(x, whole, adapter, mine)
        torch.testing.assert_close(y, wanted)
        found = gradients(y, x, layer.weight, adapter)
        assert ("x" in found, "weight" in found) == (of_input, False)
        torch.testing.assert_close(found, gradients(wanted, x, whole, adapter))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected(x, whole, adapter, None))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_row_with_an_adapter_and_an_activation_is_torchs(recomputed: bool, dropout: float) -> None:
    adapter = factors("q", dropout)
    layer = RowParallelLinear(
        INPUTS, 6, LayerContext(ALONE, torch.float32, CPU), recompute_activation=recomputed, adapter=adapter
    )
    layer.weight.data = drawn(6, INPUTS, seed=2)
    x, mine = drawn(BATCH, LENGTH, INPUTS, seed=1).requires_grad_(), noise()
    y, wanted = layer(x, torch.tanh, mine), expected(torch.tanh(x), layer.weight, adapter, mine)
    torch.testing.assert_close(y, wanted)
    found = gradients(y, x, layer.weight, adapter)
    assert "weight" in found, "a weight is trained beside its adapter unless it is frozen"
    torch.testing.assert_close(found, gradients(wanted, x, layer.weight, adapter))


def test_a_deferred_weight_gradient_leaves_those_of_the_factors_where_they_are() -> None:
    queue = WeightGradQueue()
    adapter = factors("qkv")
    layer = ColumnParallelLinear(
        INPUTS, 12, LayerContext(ALONE, torch.float32, CPU, weight_grads=queue), adapter=adapter
    )
    layer.weight.data = drawn(12, INPUTS, seed=2)
    x = drawn(BATCH, LENGTH, INPUTS, seed=1).requires_grad_()
    wanted = gradients(expected(x, layer.weight, adapter, None), x, layer.weight, adapter)
    queue.enabled = True
    found = gradients(layer(x), x, layer.weight, adapter)
    assert "weight" not in found
    torch.testing.assert_close(found, {name: each for name, each in wanted.items() if name != "weight"})
    run_deferred(queue.take())
    torch.testing.assert_close(layer.weight.grad, wanted["weight"])


@pytest.mark.parametrize("num_transposed", [3, pytest.param(0, marks=pytest.mark.matrix)])
def test_the_operator_that_compiled_layers_call_is_the_product(num_transposed: int) -> None:
    call = factors("kv").requires_grad_(False).product(12, None)
    x, weight = drawn(BATCH, LENGTH, INPUTS, seed=1), drawn(12, INPUTS, seed=2)
    weight = torch.cat([block.t() for block in weight.chunk(3)]) if num_transposed else weight
    u, bounds, scales = call.down(x), [6, 9, 0, 2, 9, 12, 2, 5], [part.scale for part in call.parts]
    given = (x, weight, num_transposed, u, list(call.b), bounds, scales, 12)
    torch.library.opcheck(torch.ops.tk.adapted_product.default, given)
    wanted = adapted_product(x, weight, num_transposed, call, u)
    assert torch.equal(torch.ops.tk.adapted_product(*given), wanted)


def test_a_sum_of_low_precision_is_rounded_once() -> None:
    adapter = factors("qkv", dtype=torch.bfloat16)
    layer = ColumnParallelLinear(INPUTS, 12, LayerContext(ALONE, torch.bfloat16, CPU), adapter=adapter)
    layer.weight.data = drawn(12, INPUTS, seed=2, dtype=torch.bfloat16)
    layer.weight.requires_grad_(False)
    x = drawn(BATCH, LENGTH, INPUTS, seed=1, dtype=torch.bfloat16).requires_grad_()
    wide = factors("qkv")
    for name, parameter in wide.named_parameters():
        parameter.data = adapter.get_parameter(name).detach().float()
    wide_x, weight = x.detach().float().requires_grad_(), nn.Parameter(layer.weight.float(), requires_grad=False)
    y, wanted = layer(x), expected(wide_x, weight, wide, None)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), wanted, rtol=2**-7, atol=0.05)
    for name, each in gradients(y, x, layer.weight, adapter).items():
        assert each.dtype == torch.bfloat16
        other = gradients(expected(wide_x, weight, wide, None), wide_x, weight, wide)[name]
        assert (each.float() - other).norm() < 1e-2 * other.norm(), name
