"""The kernels of a layer on a GPU, as far as a CPU can count them, and what they compute.

The layer takes the ways of a GPU, on tensors of the CPU. RMSNorm, which is one kernel with CUDA and several on a CPU,
is counted as one in forward and one in backward. Views and memory without values are no kernels.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tk.model import norm
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder, DecoderLayer
from tk.model.rope import rotation
from tk.parallel import fusion
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.train.engine.attention import causal_attention

MOST: Final = 45
_NO_KERNELS: Final = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach")
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# norms of heads; and a rotation of half of each head
KEYS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "glm4_moe": {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


class _Kernels(TorchDispatchMode):
    """Counts the kernels that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self._within_one = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch need not import its compiler, to hide this from it

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Counts all operators of a context as one kernel."""
        self.found[name] += 1
        self._within_one = True
        yield
        self._within_one = False

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Runs an operator."""
        if not self._within_one and not operation.is_view and not str(operation).startswith(_NO_KERNELS):
            self.found[str(operation)] += 1
        return operation(*arguments, **(keywords or {}))


class _NormOfCuda(torch.autograd.Function):
    """torch's RMSNorm, with as many kernels as it has with CUDA."""

    kernels = _Kernels()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Counts one kernel."""
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        with _NormOfCuda.kernels.one("rms_norm"):
            return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Counts one kernel."""
        with _NormOfCuda.kernels.one("rms_norm_backward"), torch.enable_grad():
            x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            normed = F.rms_norm(x.float(), weight.shape, weight.float(), ctx.eps)
            grad_x, grad_weight = torch.autograd.grad(normed, (x, weight), grads[0].float())
            return grad_x, grad_weight, None


class _Functions:
    """torch.nn.functional as `norm` uses it."""

    @staticmethod
    def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> Any:
        """Calls the norm that is counted."""
        return _NormOfCuda.apply(x, weight, eps)  # type: ignore[no-untyped-call]


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(fusion, "has_few_kernels", lambda tensor: True)
        patch.setattr(norm, "F", _Functions)
        yield


def made(
    architecture: str, dtype: torch.dtype, wider: torch.dtype | None = None
) -> tuple[DecoderLayer, list[torch.Tensor]]:
    """Returns a layer with random weights, hidden states [B, L, D], the gradient of its output, cosines and sines.

    Args:
        architecture: that of the layer.
        dtype: the one to which values are rounded.
        wider: the one that the tensors have; None for the same.
    """
    wide = wider or dtype
    config = ModelConfig(architecture=architecture, **SHAPE, **KEYS[architecture])
    draw = torch.Generator().manual_seed(0)
    decoder = Decoder(config, LayerContext(ALONE, wide, torch.device("cpu")))
    for parameter in decoder.parameters():
        values = torch.randn(parameter.shape, generator=draw) * 0.2 + (parameter.dim() == 1)
        parameter.data.copy_(values.to(dtype))
    (layer,) = decoder.model.layers.values()
    assert isinstance(layer, DecoderLayer)
    assert decoder.spec.rope is not None
    turned = rotation(torch.arange(24).expand(2, -1), decoder.spec.head_dim, decoder.spec.rope, dtype)  # rounded
    hidden = (torch.randn(2, 24, 64, generator=draw) for _ in range(2))
    return layer, [each.to(dtype).to(wide) for each in (*hidden, *turned)]


def results(layer: DecoderLayer, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the layer's output and all gradients."""
    given, grad, cos, sin = inputs
    x = given.detach().requires_grad_()
    y = layer(x, (cos, sin), causal_attention)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)]


@pytest.mark.parametrize("dtype", list(WIDER))
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_layer_takes_few_kernels_forward_and_backward(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = made("llama", dtype)
    monkeypatch.setattr(_NormOfCuda, "kernels", _Kernels())
    with _NormOfCuda.kernels as kernels:
        results(layer, inputs)
    assert kernels.found.total() <= MOST, kernels.found
    assert kernels.found["rms_norm"] == kernels.found["rms_norm_backward"] == 2


@pytest.mark.parametrize("architecture", list(KEYS))
@pytest.mark.parametrize(("dtype", "wider"), WIDER.items())
def test_it_is_as_exact_as_the_ways_of_a_cpu(
    dtype: torch.dtype, wider: torch.dtype, architecture: str, request: pytest.FixtureRequest
) -> None:
    layer, inputs = made(architecture, dtype)
    of_cpu = results(layer, inputs)
    exact = results(*(made(architecture, dtype, wider)))
    request.getfixturevalue("_as_on_a_gpu")
    for found, other, wanted in zip(results(layer, inputs), of_cpu, exact, strict=True):
        off, other_off = ((each.double() - wanted).norm() / wanted.norm() for each in (found, other))
        assert off < 1.1 * other_off + 1e-7, (off, other_off)
