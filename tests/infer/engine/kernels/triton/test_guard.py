"""The guard: the interpreter is wrong in bf16, and a kernel that does not widen it is refused."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tk.tests.infer.engine.kernels.triton.where import IS_PRETENDED, ON_GPU

pytestmark = [pytest.mark.triton, pytest.mark.skipif(ON_GPU or IS_PRETENDED, reason="of the interpreter")]


@triton.jit
def _times(x: tl.tensor, out: tl.tensor, WIDEN: tl.constexpr) -> None:
    at = tl.arange(0, 16)
    a = tl.load(x + at)
    if WIDEN:
        a = a.to(tl.float32)
    tl.store(out + at, (a * a).to(tl.float32))


@triton.jit
def _product(x: tl.tensor, out: tl.tensor, WIDEN: tl.constexpr) -> None:
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a = tl.load(x + at)
    if WIDEN:
        a = a.to(tl.float32)
    tl.store(out + at, tl.dot(a, a))


@triton.jit
def _narrowed(x: tl.tensor, out: tl.tensor, num: tl.constexpr) -> None:
    at = tl.arange(0, num)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16))


def values() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    return drawn, torch.zeros(16, 16)


@pytest.mark.parametrize("kernel", [_times, _product], ids=["mul", "dot"])
def test_a_kernel_without_widening_is_refused(kernel: Any) -> None:
    x, out = values()
    with pytest.raises(InterpreterError, match="in bf16: widen its operands to fp32"):
        kernel[(1,)](x, out, False)
    kernel[(1,)](x, out, True)
    wide = x.float()
    expected = wide[0] * wide[0] if kernel is _times else wide @ wide
    torch.testing.assert_close(out[0] if kernel is _times else out, expected)


def test_without_the_guard_such_a_kernel_is_wrong_and_silent(interpreter: ExitStack) -> None:
    """If this fails, the interpreter has learned bf16, and the guard can go."""
    x, out = values()
    interpreter.close()
    _product[(1,)](x, out, False)
    assert not torch.allclose(out, x.float() @ x.float(), atol=1.0)


def test_bf16_is_rounded_half_to_even() -> None:
    x = torch.cat([torch.randn(1000), torch.tensor([3e38, -3.4e38, 1e-39, 1 + 2**-8, 1 + 3 * 2**-8])])
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    out = torch.zeros(1024, dtype=torch.bfloat16)
    _narrowed[(1,)](x, out, 1024)
    assert torch.equal(out, x.bfloat16())
