"""Blocked attention: exact attention within the rounding of torch's own kernel, the same bits however it is called."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tk.model.attention import AttendingLayer
from tk.train.engine import blocked_attention as module
from tk.train.engine.attention import attention_within, causal_attention
from tk.train.engine.blocked_attention import (
    BlockedAttention,
    blocked_attention,
    blocked_or,
    compiled_attention,
)
from tk.train.engine.native_attention import AttentionCall, native_attention

needs_kernel = pytest.mark.skipif(native_attention() is None, reason="this CPU has no kernel, or a better one")
Heads = tuple[int, int, int, int, int]
SIZES: list[Heads] = [(2, 200, 4, 2, 64), (1, 77, 4, 1, 128), (3, 33, 2, 2, 64), (1, 1, 2, 1, 64), (2, 64, 3, 3, 192)]


class Layer:
    """An attention layer, as attention sees it."""

    layer = 0

    def __init__(self, window: int | None = None) -> None:
        self.window = window


class Refusing:
    """An attention that computes nothing, and counts its calls."""

    calls = 0

    def __call__(self, at: AttendingLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return q


def heads(sizes: Heads, scale: float = 1.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v as parts of one tensor, and so with strides, in bf16."""
    batch, length, num_heads, key_heads, width = sizes
    torch.manual_seed(1)
    whole = (scale * torch.randn(batch, length, num_heads + 2 * key_heads, width)).bfloat16()
    q, k, v = whole.split((num_heads, key_heads, key_heads), dim=2)
    return q, k, v


def exact(
    values: tuple[torch.Tensor, ...], grad: torch.Tensor, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """Returns outputs and gradients of torch's attention in a dtype."""
    own = [each.to(dtype).detach().requires_grad_() for each in values]
    q, k, v = (each.transpose(1, 2) for each in own)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, own, grad.to(dtype))


def ours(values: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    own = [each.detach().requires_grad_() for each in values]
    out = blocked_attention(*own)
    return out.detach(), *torch.autograd.grad(out, own, grad)


def gradient(sizes: Heads) -> torch.Tensor:
    """Returns the gradient of an output; its heads are not dense in memory."""
    batch, length, num_heads, _, width = sizes
    values = torch.randn(batch, length, width, num_heads, generator=torch.Generator().manual_seed(2))
    return values.bfloat16().transpose(2, 3)


@needs_kernel
@pytest.mark.parametrize("scale", [0.02, 1.5, 12.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_as_exact_as_those_of_torchs_kernel(sizes: Heads, scale: float) -> None:
    values, grad = heads(sizes, scale), gradient(sizes)
    wanted = exact(values, grad)
    whole = torch.stack([each.norm() for each in wanted[1:]]).norm()
    for name, found, theirs, right in zip(
        ("out", "q", "k", "v"), ours(values, grad), exact(values, grad, torch.bfloat16), wanted, strict=True
    ):
        assert (found.dtype, found.shape) == (torch.bfloat16, right.shape)
        off, others = ((each.double() - right).norm() for each in (found, theirs))
        assert off <= 1.2 * others + 2**-9 * (right.norm() if name == "out" else 1e-2 * whole), (name, off, others)


@needs_kernel
def test_threads_other_rows_and_later_tokens_change_no_bit() -> None:
    sizes: Heads = (3, 150, 4, 2, 64)
    values, grad = heads(sizes), gradient(sizes)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(ours(values, grad))
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.pairwise(found):
        assert all(map(torch.equal, one, other))
    alone = ours(tuple(each[1:2] for each in values), grad[1:2])
    assert all(torch.equal(each, whole[1:2]) for each, whole in zip(alone, found[0], strict=True))
    out = blocked_attention(*(each[:, :100] for each in values))
    assert torch.equal(out, found[0][0][:, :100])


@needs_kernel
def test_the_operator_keeps_the_rules_of_torch() -> None:
    values = tuple(each.detach().requires_grad_() for each in heads((1, 40, 2, 1, 64)))
    out, _ = compiled_attention(*values)
    assert torch.equal(out, blocked_attention(*values))
    found = torch.autograd.grad(out.sum(), values)
    assert all(map(torch.equal, found, torch.autograd.grad(blocked_attention(*values).sum(), values)))
    torch.library.opcheck(
        compiled_attention, values, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


@pytest.mark.matrix
@needs_kernel
def test_no_run_without_compile_imports_torchs_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from tk.train.engine.attention import attention_within\n"
        "class Layer: window, layer = None, 0\n"
        "q = torch.ones(1, 40, 2, 64, dtype=torch.bfloat16, requires_grad=True)\n"
        "attention_within(())(Layer(), q, q, q).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_kernel
def test_what_the_kernel_does_not_take_goes_elsewhere() -> None:
    q, k, v = heads((1, 40, 4, 2, 64))
    for threads, window, dtype, width in (
        (3, None, torch.bfloat16, 64),
        (1, 7, torch.bfloat16, 64),
        (1, None, torch.float32, 64),
        (1, None, torch.bfloat16, 32),
    ):
        other = Refusing()
        BlockedAttention(other, threads)(Layer(window), *(each[..., :width].to(dtype) for each in (q, k, v)))
        assert other.calls == 1
    other = Refusing()
    found = BlockedAttention(other, 2)(Layer(), q, k, v)
    assert other.calls == 0
    torch.testing.assert_close(found, causal_attention(Layer(), q, k, v), rtol=2**-6, atol=2**-7)


@needs_kernel
def test_rows_and_documents_of_training_go_through_the_kernel() -> None:
    values = heads((1, 40, 4, 2, 64))
    whole = blocked_attention(*values)
    assert torch.equal(attention_within(())(Layer(), *values), whole)
    apart = [blocked_attention(*(each[:, part] for each in values)) for part in (slice(0, 15), slice(15, 40))]
    assert torch.equal(attention_within((15, 25))(Layer(), *values), torch.cat(apart, dim=1))


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The kernel as if this process had not asked for it yet."""
    module._is_usable.cache_clear()
    yield
    module._is_usable.cache_clear()


@pytest.mark.usefixtures("unchecked")
def test_without_the_kernel_it_is_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native_attention", lambda: None)
    assert blocked_or(causal_attention) is causal_attention


@needs_kernel
@pytest.mark.usefixtures("unchecked")
def test_a_kernel_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(blocked_or(causal_attention), BlockedAttention)
    module._is_usable.cache_clear()
    right = native_attention()
    assert right is not None

    def wrong(call: AttentionCall, *, backward: bool, threads: int) -> None:
        call.scale *= 1.0 if not backward else 1.1
        right(call, backward=backward, threads=threads)

    monkeypatch.setattr(module, "native_attention", lambda: wrong)
    assert blocked_or(causal_attention) is causal_attention
    assert "attention is not used" in caplog.text
