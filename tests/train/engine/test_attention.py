"""Causal attention of training against a softmax in fp64, with windows that several blocks of queries see."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from tk.train.engine import attention
from tk.train.engine.attention import attention_within, causal_attention

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


@dataclass
class Windowed:
    """A layer as attention sees it."""

    layer: int
    window: int | None


def drawn(length: int) -> list[torch.Tensor]:
    """Returns queries, keys, values and the gradient of outputs, [2, L, heads, E] in fp64."""
    noise = torch.Generator().manual_seed(0)
    counts = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(2, length, n, WIDTH, generator=noise, dtype=torch.float64) for n in counts]


def exact(
    q_BLHE: torch.Tensor, k_BLKE: torch.Tensor, v_BLKE: torch.Tensor, window: int | None, starts: list[int]
) -> torch.Tensor:
    """Returns the attention of rows whose documents begin at these places of the flattened rows."""
    rows, length = q_BLHE.shape[:2]
    k, v = (each.repeat_interleave(HEADS // KEY_HEADS, dim=2) for each in (k_BLKE, v_BLKE))
    place = torch.arange(rows * length)
    document = torch.searchsorted(torch.tensor(starts), place, right=True)
    distance = place.unsqueeze(-1) - place
    seen = (distance >= 0) & (document.unsqueeze(-1) == document) & (distance < (window or len(place)))
    q, k, v = (each.flatten(0, 1).transpose(0, 1) for each in (q_BLHE, k, v))
    weights = (q @ k.mT * WIDTH**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    attended: torch.Tensor = (weights @ v).transpose(0, 1).view_as(q_BLHE)
    return attended


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40])
@pytest.mark.parametrize("documents", [(), (40, 3, 20, 17)])
def test_it_is_a_softmax_over_what_each_query_sees(
    monkeypatch: pytest.MonkeyPatch, window: int | None, documents: tuple[int, ...]
) -> None:
    monkeypatch.setattr(attention, "_QUERIES", 16)
    *values, grad = drawn(40)
    mine, right = ([each.clone().requires_grad_() for each in values] for _ in range(2))
    found = attention_within(documents)(Windowed(0, window), mine[0], mine[1], mine[2])
    starts = [0, 40] if not documents else [0, *accumulate(documents[:-1])]
    expected = exact(right[0], right[1], right[2], window, starts)
    found.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(found, expected)
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_no_mask_grows_with_the_square_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, enable_gqa: bool
    ) -> torch.Tensor:
        sizes.append(attn_mask.numel())
        return attend(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(attention, "_QUERIES", 16)
    for length in (64, 128, 256):
        sizes.clear()
        *values, _ = drawn(length)
        causal_attention(Windowed(0, 8), values[0], values[1], values[2])
        assert len(sizes) == length // 16
        assert max(sizes) == 16 * (16 + 7)
