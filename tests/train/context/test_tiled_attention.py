"""The autograd function of attention in tiles: heads in groups, a scale, recomputation, and no gradients at all."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tk.model.recompute import recomputed
from tk.tests.train.context.plain_attention import distance, plain_gradients, random_qkv
from tk.train.context.dealing import deal
from tk.train.context.tiled_attention import OwnKeys, tiled_attention
from tk.train.context.tiles import tiles

DEALING = deal(1, 60, (40, 20), [None], 1)
TILES = tiles(DEALING, 0, None)


class HeadByHead(OwnKeys):
    """Yields one kv head at a time, in reverse order."""

    def fetched(self, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> Iterator[tuple[range, torch.Tensor, torch.Tensor]]:
        for head in reversed(range(k_NKE.shape[1])):
            yield range(head, head + 1), k_NKE[:, head : head + 1], v_NKE[:, head : head + 1]


@pytest.mark.parametrize("keys", [OwnKeys(TILES), HeadByHead(TILES)], ids=["all heads", "head by head"])
def test_heads_in_any_groups_are_plain_attention(keys: OwnKeys) -> None:
    q, k, v, grad = random_qkv(60, (6, 3))
    expected = plain_gradients((q, k, v), grad, DEALING, None)
    out = tiled_attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), keys, None)
    for mine, plain in zip((out, *torch.autograd.grad(out, (q, k, v), grad)), expected, strict=True):
        assert distance(mine.detach(), plain) < 4e-7


def test_a_scale_replaces_that_of_the_head_dim() -> None:
    q, k, v, _ = random_qkv(60, (2, 2))
    mine = tiled_attention(q, k, v, OwnKeys(tiles(deal(1, 60, (), [None], 1), 0, None)), 0.5)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    assert distance(mine, plain.squeeze(0).transpose(0, 1)) < 4e-7


def test_recomputation_gives_the_same_gradients() -> None:
    q, k, v, grad = random_qkv(60, (2, 2))
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    keys = OwnKeys(TILES)
    once = torch.autograd.grad(tiled_attention(q, k, v, keys, None), leaves, grad)
    again = torch.autograd.grad(recomputed(tiled_attention, q, k, v, keys, None), leaves, grad)
    assert all(one.equal(other) for one, other in zip(once, again, strict=True))


def test_evaluation_keeps_nothing() -> None:
    q, k, v, _ = random_qkv(60, (2, 2))
    with torch.no_grad():
        assert tiled_attention(q.requires_grad_(), k, v, OwnKeys(TILES), None).grad_fn is None
