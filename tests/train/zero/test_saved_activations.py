"""Saved tensors on the host: the gradients are those of torch, what stays is checked, and no copy is made twice."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tk.core.errors import TkError
from tk.parallel.streams import copy_between
from tk.train.zero import saved_activations
from tk.train.zero.saved_activations import LEAST, SavedActivations

CPU = torch.device("cpu")
SIZE = 64 * 64 * 4  # bytes of one tensor below


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (64, 64), generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """Projections of one input, attention over their views, and a norm with a table in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)
        self.table = nn.Buffer(random(9, 64, 64))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(random(number, *parameter.shape) / 8)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(0, 1) for part in self.qkv(self.norm(x_TD)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k * self.table.view(4, 64, 16), v, is_causal=True)
        out_TD: torch.Tensor = self.out(F.gelu(out.transpose(0, 1).flatten(1)))
        return x_TD + out_TD


def gradients(function: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, activations: Any) -> list[Any]:
    """Returns the gradients of the input and of the module's parameters, through a pass with or without hooks."""
    x_TD = random(20).requires_grad_()
    module.zero_grad()
    if activations is None:
        loss = function(x_TD).square().sum()
    else:
        with activations.hooks():
            loss = function(x_TD).square().sum()
    loss.backward()
    return [x_TD.grad, *(parameter.grad for parameter in module.parameters())]


def saved(module: nn.Module) -> SavedActivations:
    return SavedActivations(CPU, [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_have_torchs_bits_and_all_memory_comes_back(reentrant: bool | None) -> None:
    layer = Layer()
    activations = saved(layer)

    def compute(x_TD: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x_TD = layer(x_TD) if reentrant is None else checkpoint(layer, x_TD, use_reentrant=reentrant)
        return x_TD

    expected = gradients(compute, layer, None)
    for _ in range(3):
        found = gradients(compute, layer, activations)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert activations.pool.in_use == 0
    assert activations.pool.held == activations.pool.most
    if reentrant is not None:
        assert activations.pool.most == 3 * SIZE, (
            "the inputs of both layers and of the loss; nothing of a recomputation"
        )


def test_what_is_saved_leaves_the_device_and_comes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(random(1, 8, 64))
    activations, copied = SavedActivations(CPU, [weight]), list[int]()

    def copy(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
        copied.append(source.nbytes)
        copy_between(source, target, device)

    monkeypatch.setattr(saved_activations, "copy_between", copy)
    with activations.hooks():
        hidden = (random(0).requires_grad_() * 2).softmax(-1)
        storage = StorageWeakRef(hidden.untyped_storage())
        loss = F.linear(hidden, weight).sum() + F.linear(hidden.view(32, 128)[:, :64], weight).sum()
        loss = loss + hidden.square().sum()
        del hidden
    assert storage.expired()
    assert activations.pool.in_use == SIZE, "softmax, both products and the square have one copy"
    loss.backward()
    assert copied == [SIZE, SIZE], "down and up"
    assert activations.pool.in_use == 0


def test_a_graph_that_is_dropped_gives_its_memory_back() -> None:
    activations, layer = SavedActivations(CPU, []), Layer()
    with activations.hooks():
        loss = layer(random(0)).sum()
    held = activations.pool.in_use
    assert held > 0
    del loss
    gc.collect()
    assert (activations.pool.held, activations.pool.in_use) == (held, 0)


@pytest.mark.parametrize("rows", [64, 8])
def test_the_input_of_a_stage_is_freed_if_what_is_saved_of_it_has_moved(rows: int) -> None:
    layer, activations, given = Layer(), SavedActivations(CPU, []), random(3)[:rows].clone()
    given.requires_grad_()
    with activations.hooks():
        loss = layer.norm(given).square().sum() + given[:1].square().sum()
    activations.free(given)
    assert given.untyped_storage().nbytes() == (0 if rows == 64 else given.nbytes)
    loss.backward()
    again = random(3)[:rows].clone().requires_grad_()
    (layer.norm(again).square().sum() + again[:1].square().sum()).backward()
    assert given.grad is not None
    assert again.grad is not None
    assert torch.equal(given.grad, again.grad)


def test_a_view_comes_back_with_its_strides_over_the_memory_that_it_shares() -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            seen.append(ctx.saved_tensors)
            return torch.ones_like(seen[0][0]), *([None] * (len(seen[0]) - 1))

    whole = random(0).requires_grad_().clone()
    parts = [whole, whole.t(), whole[3:, 1::2], whole.detach().view(torch.int32)[5], whole[:1].expand(9, 64)]
    apart = whole.detach()[7, 3:20]
    activations = SavedActivations(CPU, [])
    with activations.hooks():
        loss = Keeps.apply(*parts, apart)  # type: ignore[no-untyped-call]
    strides, values = [part.stride() for part in parts], [part.detach().clone() for part in parts]
    loss.backward()
    for part, stride, value in zip(seen[0], strides, values, strict=False):
        assert part.stride() == stride
        assert torch.equal(part, value)
    assert torch.equal(seen[0][-1], apart)
    pointers = {part.untyped_storage().data_ptr() for part in seen[0][:3]}
    assert len(pointers) == 1
    assert pointers != {whole.untyped_storage().data_ptr()}


def test_a_small_part_of_a_large_tensor_is_copied_alone() -> None:
    data, activations, weight = random(0, 1000, 64), SavedActivations(CPU, []), random(1, 64, 64).requires_grad_()
    with activations.hooks():
        loss = (data[100:132] @ weight).sum()
    assert activations.pool.in_use == 32 * 64 * 4
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, data[100:132].t() @ torch.ones(32, 64))


def test_parameters_buffers_small_tensors_and_those_of_other_kinds_stay() -> None:
    weight, table = nn.Parameter(random(0)), random(1)
    activations = SavedActivations(CPU, [weight, table])
    small, sparse = random(2, LEAST // 8), torch.eye(64).to_sparse().requires_grad_()
    with activations.hooks():
        loss = (weight[:32] * table[:32]).sum() + (small * small.clone().requires_grad_()).sum()
        loss = loss + torch.sparse.sum(sparse * sparse)
    assert activations.pool.most == 0
    loss.backward()
    assert sparse.grad is not None
    with SavedActivations(torch.device("meta"), []).hooks():  # no tensor of the CPU is on that device
        loss = (random(0) * weight).square().sum()
    loss.backward()


@pytest.mark.parametrize("elements", [LEAST // 8, 64 * 64])
def test_a_change_in_place_after_the_save_is_refused_or_does_not_reach_the_gradient(elements: int) -> None:
    start = random(0, elements)
    activations, x_N = SavedActivations(CPU, []), start.clone().requires_grad_()
    with activations.hooks():
        between_N = x_N * 1
        loss = between_N.square().sum()
        between_N.add_(1)
        loss = loss + between_N.square().sum()
    if elements * 4 < LEAST:
        with pytest.raises(TkError, match=r"float32 \[512\] that backward needs was changed in place"):
            loss.backward()
        return
    assert activations.pool.in_use == 2 * SIZE, "of before and of after the change"
    loss.backward()
    assert x_N.grad is not None
    assert torch.equal(x_N.grad, 2 * start + 2 * (start + 1))


def test_a_change_that_another_tensor_of_the_memory_counts_does_not_reach_the_gradient() -> None:
    """Both count one change, of two contents."""
    start, weight = random(0), random(1).requires_grad_()
    activations = SavedActivations(CPU, [])
    with activations.hooks():
        first = start.clone()
        first.add_(1)
        loss = (first * weight).sum()
        second = first.data
        second.mul_(3)
        loss = loss + (second * weight).sum()
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, (start + 1) + (start + 1) * 3)


def test_memory_that_is_used_again_for_another_tensor_is_another_one() -> None:
    weight, activations = random(0).requires_grad_(), SavedActivations(CPU, [])
    with activations.hooks():
        loss = torch.zeros(())
        for number in range(20):  # malloc gives each the memory of the one before
            loss = loss + (torch.full((64, 64), float(number)) * weight).sum()
    assert activations.pool.in_use == 20 * SIZE
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((64, 64), 190.0))


def test_parameters_that_change_before_backward_are_refused() -> None:
    weight = nn.Parameter(random(0))
    activations = SavedActivations(CPU, [weight])
    with activations.hooks():
        loss = (random(1).requires_grad_() @ weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(TkError, match="changed in place"):
        loss.backward()


def test_a_backward_that_writes_into_what_it_gets_is_found_at_the_next_use() -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            x.zero_()
            return grads[0]

    activations = SavedActivations(CPU, [])
    with activations.hooks():
        hidden = random(0).requires_grad_() * 1
        squares = hidden.square().sum()
        written = Writes.apply(hidden)  # type: ignore[no-untyped-call]
        loss = squares + written.sum()  # backward begins with what forward did last
    with pytest.raises(TkError, match="changed in place"):
        loss.backward()


def test_a_graph_is_read_twice_and_differentiated_twice() -> None:
    weight = random(0).requires_grad_()

    def twice(loss: torch.Tensor) -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
        (again,) = torch.autograd.grad(loss, weight, create_graph=True)
        return [first, again.detach(), *torch.autograd.grad(again.square().sum(), weight)]

    expected = twice((random(1) @ weight).tanh().square().sum())
    activations = SavedActivations(CPU, [])
    with activations.hooks():
        loss = (random(1) @ weight).tanh().square().sum()
    assert all(map(torch.equal, twice(loss), expected))
    del loss
    assert activations.pool.in_use == 0
