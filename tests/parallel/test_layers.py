"""Tensor-parallel layers against torch's own on the whole weight: outputs and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tk.core.layout import Layout
from tk.parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear, VocabParallelEmbedding
from tk.parallel.mesh import Group, Mesh
from tk.tests.rank_pool import RankPool

CPU = torch.device("cpu")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tp() -> Group:
    size = torch.distributed.get_world_size()
    return Mesh.build(Layout(tp=size), num_kv_heads=size).tp


def _assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def check_mlp() -> None:
    """Compares a column layer and a row layer with two whole linears: output, gradients of input and weights."""
    tp = _tp()
    up, down = (nn.Linear(*shape, bias=False, dtype=torch.float64) for shape in ((8, 12), (12, 8)))
    with torch.no_grad():
        up.weight.copy_(_random(12, 8, seed=1))
        down.weight.copy_(_random(8, 12, seed=2))
    x = _random(5, 8, seed=3).double().requires_grad_()
    mine = x.detach().clone().requires_grad_()
    rows = slice(tp.rank * 12 // tp.size, (tp.rank + 1) * 12 // tp.size)
    column = ColumnParallelLinear(8, 12 // tp.size, LayerContext(tp, torch.float64, CPU))
    row = RowParallelLinear(12 // tp.size, 8, LayerContext(tp, torch.float64, CPU))
    with torch.no_grad():
        column.weight.copy_(up.weight[rows])
        row.weight.copy_(down.weight[:, rows])
    expected, actual = down(F.silu(up(x))), row(F.silu(column(mine)))
    _assert_close(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    _assert_close(mine.grad, x.grad)
    _assert_close(column.weight.grad, up.weight.grad[rows] if up.weight.grad is not None else None)
    _assert_close(row.weight.grad, down.weight.grad[:, rows] if down.weight.grad is not None else None)


def check_embedding(vocab_size: int) -> None:
    """Compares an embedding over a padded, split vocabulary with torch's, gradients included."""
    tp = _tp()
    rows = -(-vocab_size // tp.size)
    first = tp.rank * rows
    table = nn.Parameter(_random(vocab_size, 6, seed=6))
    embedding = VocabParallelEmbedding(rows, 6, LayerContext(tp, torch.float32, CPU))
    part = table.detach()[first : first + rows]
    with torch.no_grad():
        embedding.weight.zero_()[: len(part)] = part
    ids = torch.tensor([[0, vocab_size - 1, 3], [5, 5, vocab_size // 2]])
    hidden, expected = embedding(ids), F.embedding(ids, table)
    _assert_close(hidden, expected)
    weights = torch.arange(1.0, 7.0)
    (expected * weights).sum().backward()
    (hidden * weights).sum().backward()
    assert table.grad is not None
    assert embedding.weight.grad is not None
    _assert_close(embedding.weight.grad[: len(part)], table.grad[first : first + rows])
    assert not embedding.weight.grad[len(part) :].any(), "padded rows must get no gradient"


@pytest.mark.parametrize("world_size", [2, 4])
def test_column_then_row_equals_two_linears(rank_pool: RankPool, world_size: int) -> None:
    rank_pool.run(check_mlp, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("vocab_size", [16, 13])
def test_a_split_embedding_equals_torchs(rank_pool: RankPool, world_size: int, vocab_size: int) -> None:
    rank_pool.run(check_embedding, world_size, vocab_size=vocab_size)
