"""A feed-forward block in blocks of rows: the values of the whole one, and no tensor of all rows by inner size."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tk.core.layout import Layout
from tk.model.activation import gelu_new, swiglu
from tk.model.decoder import Decoder
from tk.parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from tk.parallel.linear import Activation
from tk.parallel.mesh import ALONE, Mesh
from tk.parallel.mlp_blocks import MLPBlocks
from tk.parallel.weight_grads import WeightGradQueue, run_deferred
from tk.tests.model.decoders import backward, build, compare_with_one_process, config_of, gradients
from tk.tests.rank_pool import RankPool

HIDDEN, INNER = 12, 40
CPU = torch.device("cpu")


class Sizes(TorchDispatchMode):
    """Records the size of the largest tensor that any operator returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        self.largest = max(self.largest, *sizes, 0)
        return found


@contextmanager
def no_tensor_of(elements: int) -> Iterator[None]:
    """Checks that no operator returns a tensor of so many elements or more."""
    with Sizes() as sizes:  # type: ignore[no-untyped-call]
        yield
    assert sizes.largest < elements


def layers(dtype: torch.dtype, gated: bool, bias: bool) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    context, generator = LayerContext(ALONE, dtype, CPU), torch.Generator().manual_seed(3)
    up = ColumnParallelLinear(HIDDEN, 2 * INNER if gated else INNER, context, bias=bias, num_transposed=int(bias))
    down = RowParallelLinear(INNER, HIDDEN, context, bias=bias, transposed=bias)
    for parameter in (*up.parameters(), *down.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.3).to(dtype)
    return up, down


def results(
    function: Any, x_BLD: torch.Tensor, grad_BLD: torch.Tensor, parameters: list[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Returns the output of a function, and the gradients of its input and of parameters."""
    x_BLD = x_BLD.detach().requires_grad_()
    y_BLD = function(x_BLD)
    return [y_BLD.detach(), *torch.autograd.grad(y_BLD, [x_BLD, *parameters], grad_BLD)]


@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("num_rows", [1, 3, 7, 100])
def test_blocks_of_rows_have_the_values_of_the_whole(num_rows: int, gated: bool, bias: bool) -> None:
    up, down = layers(torch.float64, gated, bias)
    activation: Activation = swiglu if gated else gelu_new
    x_BLD, grad_BLD = torch.randn(2, 2, 7, HIDDEN, dtype=torch.float64).unbind()
    parameters = [*up.parameters(), *down.parameters()]
    blocks = MLPBlocks(up, down, activation, num_rows)
    expected = results(lambda x: down(up(x), activation), x_BLD, grad_BLD, parameters)
    for mine, whole in zip(results(blocks, x_BLD, grad_BLD, parameters), expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(blocks(x_BLD), expected[0], rtol=1e-12, atol=1e-12)


def test_only_gradients_that_are_wanted_are_computed() -> None:
    up, down = layers(torch.float32, True, False)
    up.weight.requires_grad_(False)
    x_BLD = torch.randn(1, 7, HIDDEN)
    MLPBlocks(up, down, swiglu, 3)(x_BLD).sum().backward()
    assert up.weight.grad is None
    assert down.weight.grad is not None


def test_the_sums_of_many_blocks_are_as_exact_as_one_product() -> None:
    """In bf16 a sum of bf16 terms would stop growing after some hundred blocks."""
    up, down = layers(torch.bfloat16, True, False)
    x_BLD = torch.randn(1, 512, HIDDEN, generator=torch.Generator().manual_seed(4)).abs().bfloat16()
    grad_BLD = torch.ones_like(x_BLD)
    parameters = [up.weight, down.weight]
    found = results(MLPBlocks(up, down, swiglu, 1), x_BLD, grad_BLD, parameters)
    for layer in (up, down):
        layer.weight.data = layer.weight.data.double()
    exact = results(lambda x: down(up(x), swiglu), x_BLD.double(), grad_BLD.double(), [up.weight, down.weight])
    for mine, wanted in zip(found[2:], exact[2:], strict=True):
        assert (mine.double() - wanted).norm() < 4e-3 * wanted.norm()


def test_no_tensor_grows_with_rows_by_inner_size() -> None:
    up, down = layers(torch.float32, True, False)
    length = 400
    x_BLD = torch.randn(1, length, HIDDEN, requires_grad=True)
    with no_tensor_of(length * INNER):
        MLPBlocks(up, down, swiglu, 16)(x_BLD).sum().backward()
    with pytest.raises(AssertionError), no_tensor_of(length * INNER):
        down(up(x_BLD), swiglu)


def _decoder(**options: Any) -> Decoder:
    return build(config_of("qwen3"), ALONE, **options)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_receive_one_gradient_per_pass_while_others_are_deferred(recompute: str) -> None:
    """A bucket is reduced when each parameter's gradient has come: a second one would come too late."""
    queue = WeightGradQueue()
    queue.enabled = True
    decoder = _decoder(mlp_block=5, recompute=recompute, weight_grads=queue)
    calls: dict[str, int] = {}
    for name, parameter in decoder.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: calls.get(name, 0) + 1}))
    loss = backward(decoder)
    assert {name for name in calls if ".mlp." in name} == {
        name for name, _ in decoder.named_parameters() if ".mlp." in name
    }
    run_deferred(queue.take())
    assert set(calls.values()) == {1}
    plain = _decoder()
    torch.testing.assert_close(loss, backward(plain))
    expected = gradients(plain)
    for key, value in gradients(decoder).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def check_at_tp() -> None:
    mesh = Mesh.build(Layout(tp=2), 2)
    for name in ("qwen3", "gpt2"):
        for sequence_parallel in (False, True):
            compare_with_one_process(mesh, name, mlp_block=3, sequence_parallel=sequence_parallel)


def test_tensor_parallel_ranks_agree_with_one_process(rank_pool: RankPool) -> None:
    rank_pool.run(check_at_tp, 2)
