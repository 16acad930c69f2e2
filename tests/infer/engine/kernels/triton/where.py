"""Where the tests of kernels compute: on a GPU, where there is one, else on the CPU in Triton's interpreter.

With TK_PRETEND_GPU=1 they do beside the interpreter what they would do on a GPU: their tensors lie on a pretended one.
"""

import os
from typing import Final

import torch

IS_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
IS_PRETENDED: Final = IS_INTERPRETED and os.environ.get("TK_PRETEND_GPU") == "1"
ON_GPU: Final = torch.cuda.is_available() and not IS_INTERPRETED
DEVICE: Final = torch.device("meta" if IS_PRETENDED else "cuda" if ON_GPU else "cpu")  # see pretend_gpu.py
# The dtypes of products with their distances from exact ones: the interpreter's bf16 is wrong (see guard.py).
CLOSE: Final = {torch.float32: 1e-6, torch.float16: 1e-3} | ({torch.bfloat16: 8e-3} if ON_GPU else {})
