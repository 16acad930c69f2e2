"""The product of linear layers against torch's, and its backward: overlapping sums, deferred weight gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tk.core.layout import Layout
from tk.parallel import linear
from tk.parallel.collectives import PendingResult
from tk.parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.parallel.weight_grads import WeightGradQueue, run_deferred
from tk.tests.rank_pool import RankPool

CPU = torch.device("cpu")


class _Watched:
    """A column- and a row-parallel layer on one queue; `fired` lists the layers whose gradient hooks were called."""

    def __init__(self, tp: Group, transposed: bool = False, **options: Any) -> None:
        self.queue = WeightGradQueue()
        context = LayerContext(tp, torch.float32, CPU, weight_grads=self.queue, **options)
        self.up = ColumnParallelLinear(8, 6, context, bias=True, num_transposed=3 * transposed)
        self.down = RowParallelLinear(6, 8, context, bias=True, transposed=transposed)
        self.fired: list[str] = []
        generator = torch.Generator().manual_seed(tp.rank)
        for name in ("up", "down"):
            for parameter in getattr(self, name).parameters():
                torch.nn.init.normal_(parameter, generator=generator)
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.fired.append(name))

    def backward(self) -> torch.Tensor:
        """Runs forward and backward; returns the gradient of the input."""
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(7)).requires_grad_()
        self.down(torch.tanh(self.up(x))).square().sum().backward()
        assert x.grad is not None
        return x.grad


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("num_transposed", [0, 1, 3])
def test_a_product_equals_torchs(num_transposed: int) -> None:
    x, whole, bias = _draw(2, 5, 8, seed=1), _draw(6, 8, seed=2), _draw(6, seed=3)
    blocks = [block.t() for block in whole.chunk(num_transposed)] if num_transposed else [whole]
    torch.testing.assert_close(linear.product(x, torch.cat(blocks), num_transposed, bias), F.linear(x, whole, bias))


@pytest.mark.parametrize("num_transposed", [0, 1])
def test_an_activation_before_the_product_is_computed_again_and_its_gradient_is_torchs(num_transposed: int) -> None:
    calls = []

    def activation(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return F.silu(x)

    x, whole = _draw(2, 5, 8, seed=1).requires_grad_(), _draw(6, 8, seed=2).requires_grad_()
    mine = x.detach().clone().requires_grad_()
    weight = (whole.t() if num_transposed else whole).detach().clone().requires_grad_()
    layer = linear.ParallelProduct("row", ALONE, num_transposed)
    expected, actual = F.linear(F.silu(x), whole), layer(mine, weight, activation=activation)
    torch.testing.assert_close(actual, expected)
    assert calls == [False], "forward keeps no graph of the activation"
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert calls == [False, True]
    assert weight.grad is not None
    torch.testing.assert_close(mine.grad, x.grad)
    torch.testing.assert_close(weight.grad.t() if num_transposed else weight.grad, whole.grad)
    with torch.no_grad():
        torch.testing.assert_close(layer(mine, weight, activation=activation), expected)


def check_deferred(sequence_parallel: bool, transposed: bool) -> None:
    """Compares deferred weight gradients with those of one backward pass; gradients of biases are not deferred."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    tp = Mesh.build(Layout(tp=size), size).tp if size > 1 else ALONE
    plain, watched = (_Watched(tp, sequence_parallel=sequence_parallel, transposed=transposed) for _ in range(2))
    expected = plain.backward()
    assert plain.queue.take() == []
    watched.queue.enabled = True
    torch.testing.assert_close(watched.backward(), expected)
    assert watched.fired == ["down", "up"]
    assert watched.up.weight.grad is None
    deferred = watched.queue.take()
    assert len(deferred) == 2
    run_deferred(deferred)
    assert watched.fired == ["down", "up"] * 2
    for name in ("up", "down"):
        for mine, theirs in zip(getattr(watched, name).parameters(), getattr(plain, name).parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("transposed", [False, True])
def test_deferred_gradients_are_the_same(transposed: bool) -> None:
    check_deferred(sequence_parallel=False, transposed=transposed)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_deferred_gradients_are_the_same_at_tp(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(check_deferred, 2, sequence_parallel=sequence_parallel, transposed=True)


def test_deferred_gradients_are_added_in_place() -> None:
    """Training needs this: its gradients are views of flat buffers."""
    watched = _Watched(ALONE)
    watched.queue.enabled = True
    buffer = torch.ones_like(watched.up.weight)
    watched.up.weight.grad = buffer
    watched.backward()
    assert torch.equal(buffer, torch.ones_like(buffer))
    run_deferred(watched.queue.take())
    assert watched.up.weight.grad is buffer
    plain = _Watched(ALONE)
    plain.backward()
    assert plain.up.weight.grad is not None
    torch.testing.assert_close(buffer, plain.up.weight.grad + 1)


def test_a_frozen_weight_is_not_deferred() -> None:
    watched = _Watched(ALONE)
    watched.queue.enabled = True
    watched.up.weight.requires_grad_(False)
    watched.backward()
    assert len(watched.queue.take()) == 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_weight_gradient_is_computed_while_the_sum_is_under_way(
    monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool
) -> None:
    seen: list[str] = []

    class Watching(PendingResult):
        def wait(self) -> torch.Tensor:
            seen.append("sum waited for")
            return super().wait()

    def start(grad: torch.Tensor, *_: Any) -> PendingResult:
        seen.append("sum started")
        return Watching(grad)

    def gather(x: torch.Tensor, *_: Any) -> PendingResult:
        seen.append("input's gather started")
        return PendingResult(x)

    compute = linear.weight_gradient

    def weight_gradient(*arguments: Any) -> torch.Tensor:
        seen.append("weight gradient")
        return compute(*arguments)

    monkeypatch.setattr(linear, "start_all_reduce", start)
    monkeypatch.setattr(linear, "start_reduce_scatter_dim", start)
    monkeypatch.setattr(linear, "start_all_gather_dim", gather)
    monkeypatch.setattr(linear, "all_gather_dim", lambda x, *_: x)
    monkeypatch.setattr(linear, "weight_gradient", weight_gradient)
    layer = ColumnParallelLinear(8, 6, LayerContext(Group(None, 0, 2), torch.float32, CPU, sequence_parallel))
    layer(torch.zeros(4, 8, requires_grad=True)).sum().backward()
    first = ["input's gather started"] if sequence_parallel else []
    assert seen == [*first, "sum started", "weight gradient", "sum waited for"]
