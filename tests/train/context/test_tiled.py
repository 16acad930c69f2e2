"""Attention in tiles, of every rank in turn, against torch's attention over whole rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk.tests.example_counts import examples
from tk.tests.train.context.plain_attention import distance, plain_gradients, random_qkv
from tk.tests.train.context.rows import any_rows
from tk.train.context.dealing import Dealing, deal
from tk.train.context.kernels import CpuTileKernel, PortableTileKernel, TileKernel
from tk.train.context.tiled import attend_tiles, differentiate_tiles
from tk.train.context.tiles import tiles

CLOSE = 4e-7  # of plain attention in fp32, in the norm of each tensor
KERNELS: tuple[TileKernel, ...] = (CpuTileKernel(), PortableTileKernel())


def in_tiles(
    dealing: Dealing, qkvg: list[torch.Tensor], window: int | None, kernel: TileKernel
) -> tuple[torch.Tensor, ...]:
    """Returns the output and the gradients of q, k and v over all ranks, whose tiles are computed one by one."""
    q, k, v, grad = qkvg
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for rank in range(len(dealing.runs)):
        mine, planned = torch.from_numpy(dealing.positions(rank).reshape(-1)), tiles(dealing, rank, window)
        qkv = (q[mine], k, v)
        out[mine], lse = attend_tiles(qkv, planned, kernel, None)
        of_q, of_k, of_v = differentiate_tiles(qkv, (grad[mine], out[mine], lse), planned, kernel, None)
        dq[mine] = of_q.to(q.dtype)
        dk += of_k
        dv += of_v
    return out, dq, dk, dv


@given(any_rows(), st.none() | st.integers(1, 60), st.sampled_from(((4, 4), (6, 2), (3, 1))), st.sampled_from(KERNELS))
@examples(90)
def test_tiles_are_plain_attention(
    dealing: Dealing, window: int | None, heads: tuple[int, int], kernel: TileKernel
) -> None:
    qkvg = random_qkv(dealing.num_positions, heads)
    expected = plain_gradients(tuple(qkvg[:3]), qkvg[3], dealing, window)
    whole = torch.cat([each.flatten() for each in expected]).norm()  # a gradient alone may be 0
    for mine, plain in zip(in_tiles(dealing, qkvg, window, kernel), expected, strict=True):
        assert (mine - plain).norm() <= CLOSE * whole


@pytest.mark.parametrize("kernel", KERNELS, ids=["cpu", "portable"])
@pytest.mark.parametrize("window", [None, 200])
def test_long_rows_are_within_a_bound_of_plain_attention(kernel: TileKernel, window: int | None) -> None:
    """The portable kernel computes more than one block of queries here."""
    dealing = deal(1, 700, (600, 1, 99), [window], 2)
    qkvg = random_qkv(dealing.num_positions, (4, 2))
    exact = plain_gradients(tuple(each.double() for each in qkvg[:3]), qkvg[3], dealing, window)
    plain = plain_gradients(tuple(qkvg[:3]), qkvg[3], dealing, window)
    for mine, theirs, true in zip(in_tiles(dealing, qkvg, window, kernel), plain, exact, strict=True):
        assert distance(mine, theirs) <= CLOSE
        assert distance(mine, true) <= 1.5 * distance(theirs, true), "no farther from fp64 than plain attention is"


@pytest.mark.parametrize("kernel", KERNELS, ids=["cpu", "portable"])
def test_bf16_is_rounded_once_for_each_tile(kernel: TileKernel) -> None:
    """Gradients are summed over tiles in fp32, so they are no farther from fp64 than those of one plain call."""
    dealing = deal(1, 1024, (900, 124), [None], 4)
    qkvg = random_qkv(dealing.num_positions, (4, 2), torch.bfloat16)
    exact = plain_gradients(tuple(each.double() for each in qkvg[:3]), qkvg[3], dealing, None)
    plain = plain_gradients(tuple(qkvg[:3]), qkvg[3], dealing, None)
    for mine, theirs, true in zip(in_tiles(dealing, qkvg, None, kernel), plain, exact, strict=True):
        assert distance(mine, true) <= 1.5 * distance(theirs, true)


def test_scores_far_apart_are_merged_without_overflow() -> None:
    dealing = deal(1, 64, (), [None], 2)
    q, k, v, grad = random_qkv(dealing.num_positions, (2, 1))
    q, k = q * 100, k * 100
    plain = plain_gradients((q, k, v), grad, dealing, None)
    mine = in_tiles(dealing, [q, k, v, grad], None, CpuTileKernel())
    assert torch.isfinite(torch.cat([each.flatten() for each in mine])).all()
    assert distance(mine[0], plain[0]) < 1e-5
