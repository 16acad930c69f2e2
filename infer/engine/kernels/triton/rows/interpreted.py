"""Whether kernels run in Triton's interpreter, which needs no GPU and multiplies bf16 wrongly (without torch)."""

import os
from typing import Final

INTERPRETER: Final = "TRITON_INTERPRET"


def is_interpreted() -> bool:
    """Returns whether Triton's interpreter runs kernels on the CPU, as tests let it."""
    return os.environ.get(INTERPRETER) == "1"
