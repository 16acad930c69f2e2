"""A guard of Triton's interpreter, whose bf16 is wrong: it holds the bits as integers, and calculates with those.

So kernels widen bf16 before they compute, and narrow it when they store. The guard refuses all else, and rounds to bf16
half to even, as GPUs do, where the interpreter cuts bits off.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tk.core.casts import cast
from tk.core.dtypes import BF16, FP32

_ARITHMETIC = (
    "fadd fmul fdiv frem fsub fneg precise_divf minimumf minnumf maximumf maxnumf clampf fma fabs dot dot_scaled "
    "cos exp exp2 floor ceil log log2 precise_sqrt sqrt sin erf rsqrt si_to_fp ui_to_fp fp_to_si fp_to_ui"
)


class Bf16Refused(Exception):
    """A kernel computes in bf16."""


def _refusing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: InterpreterBuilder, *args: Any) -> Any:
        found = [each.dtype if isinstance(each, TensorHandle) else each for each in args]
        if any(isinstance(each, tl.dtype) and each.scalar == tl.bfloat16 for each in found):
            raise Bf16Refused(f"{name} in bf16: widen its operands to fp32")
        return plain(self, *args)

    return operation


def _narrowing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: InterpreterBuilder, source: TensorHandle, wanted: tl.dtype, *rounding: Any) -> TensorHandle:
        if wanted.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            if source.dtype.scalar != tl.float32:
                raise Bf16Refused(f"a cast of {source.dtype} to bf16: cast it to fp32 first")
            return TensorHandle(cast(source.data, FP32, BF16).view(np.uint16), tl.bfloat16)
        return plain(self, source, wanted, *rounding)

    return convert


@contextmanager
def guarded_interpreter() -> Iterator[None]:
    """Guards the interpreter as long as the context is open.

    A kernel with arithmetic in bf16 raises an InterpreterError from `Bf16Refused`.
    """
    found = vars(InterpreterBuilder)
    compared = [name for name in found if name.startswith("create_fcmp")]
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))  # of GPUs
        for name in (*(f"create_{each}" for each in _ARITHMETIC.split()), *compared):
            stack.enter_context(patch.object(InterpreterBuilder, name, _refusing(name, found[name])))
        for name in ("create_fp_trunc", "create_fp_to_fp"):
            stack.enter_context(patch.object(InterpreterBuilder, name, _narrowing(found[name])))
        yield
