"""The memory of attention in training: on a CPU it grows with the length of rows, not with its square."""

from dataclasses import dataclass

import pytest
import torch

from tk.tests.live_bytes import LiveBytes
from tk.train.engine.attention import attention_within


@dataclass
class _Layer:
    layer: int = 0
    window: int | None = None


def peak(length: int, window: int | None, document: int) -> int:
    """Returns the most bytes that forward and backward hold for a row, beside its queries, keys and values."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, 8, generator=draw).requires_grad_() for heads in (2, 1, 1))
    documents = [document] * (length // document) if document else []
    live = LiveBytes()
    with live:
        attention_within(documents)(_Layer(window=window), q, k, v).sum().backward()
    return live.peak


@pytest.mark.parametrize(("window", "document"), [(None, 0), (256, 0), (None, 1024), (256, 1024)])
@pytest.mark.parametrize("length", [8192, pytest.param(16_384, marks=pytest.mark.matrix)])
def test_memory_is_linear_in_the_length(length: int, window: int | None, document: int) -> None:
    ratio = peak(length, window, document) / peak(length // 4, window, document)
    assert ratio <= 4.2
