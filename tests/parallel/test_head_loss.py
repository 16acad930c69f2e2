"""The loss of a head in blocks of rows against torch's linear layer and cross entropy on the whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tk.core.labels import IGNORED
from tk.core.layout import Layout
from tk.parallel import logits_blocks
from tk.parallel.functions import SEQUENCE
from tk.parallel.head_loss import HeadLoss, head_loss
from tk.parallel.linear import ParallelProduct
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.parallel.weight_grads import WeightGradQueue, run_deferred
from tk.tests.live_bytes import LiveBytes
from tk.tests.rank_pool import RankPool

BATCH, LENGTH, HIDDEN = 2, 8, 6


@contextmanager
def blocks_of(rows: int) -> Iterator[None]:
    """Makes blocks of so few rows that a small test has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_blocks, "FEWEST_ROWS", rows)
        patch.setattr(logits_blocks, "ELEMENTS", 0)
        yield


def made(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden states [B, L, D], a weight [V, D] and targets [B, L], some of them ignored."""
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=drawn).to(dtype)
    weight = torch.randn(vocab, HIDDEN, generator=drawn).to(dtype)
    targets = torch.randint(0, vocab, (BATCH, LENGTH), generator=drawn)
    targets[0, 2:5] = targets[1, -1] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), targets


def expected(vocab: int, factor: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns torch's loss with the gradients of hidden states and weight."""
    x, weight, targets = made(vocab)
    logits = F.linear(x, weight).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED) * factor
    x_gradient, weight_gradient = torch.autograd.grad(loss, (x, weight))
    return loss.detach().double(), x_gradient, weight_gradient


def check(sequence_parallel: bool, deferred: bool, backward_follows: bool, rows: int, vocab: int, tp: Group) -> None:
    """Compares the loss and its gradients on this rank with torch's."""
    queue = WeightGradQueue()
    queue.enabled = deferred
    head = ParallelProduct("column", tp, sequence_parallel=sequence_parallel and tp.size > 1, weight_grads=queue)
    x, weight, targets = made(vocab)
    held = -(-vocab // tp.size)
    mine = torch.zeros(held, HIDDEN)
    part = weight.detach()[tp.rank * held : (tp.rank + 1) * held]
    mine[: len(part)] = part
    mine.requires_grad_()
    if head.sequence_parallel:
        x = x.detach().chunk(tp.size, SEQUENCE)[tp.rank].contiguous().requires_grad_()
    with blocks_of(rows):
        loss = head_loss(x, mine, head, HeadLoss(targets, vocab, 0.25, backward_follows))
        loss.backward()
        assert (mine.grad is None) == deferred
        run_deferred(queue.take())
    loss_wanted, x_wanted, weight_wanted = expected(vocab, 0.25)
    if head.sequence_parallel:
        x_wanted = x_wanted.chunk(tp.size, SEQUENCE)[tp.rank]
    torch.testing.assert_close(loss.detach(), loss_wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, x_wanted, rtol=1e-5, atol=1e-6)
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad[: len(part)], weight_wanted[tp.rank * held :][:held], rtol=1e-5, atol=1e-6)
    assert not mine.grad[len(part) :].any(), "padded rows must get no gradient"


def check_on_ranks() -> None:
    """Runs every combination over tensor-parallel ranks, with a rank of padding alone."""
    size = torch.distributed.get_world_size()
    tp = Mesh.build(Layout(tp=size), num_kv_heads=size).tp
    for vocab in (16, 13, size * 2 - 1, size + 1):
        for number in range(8):
            check(bool(number & 1), bool(number & 2), bool(number & 4), 3 if number % 3 else 100, vocab, tp)


@pytest.mark.parametrize("rows", [1, 5, 16, 100])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("backward_follows", [False, True])
def test_loss_and_gradients_equal_torchs(backward_follows: bool, deferred: bool, rows: int) -> None:
    check(False, deferred, backward_follows, rows, 11, ALONE)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_with_parts_of_the_vocabulary_get_the_same(rank_pool: RankPool, world_size: int) -> None:
    rank_pool.run(check_on_ranks, world_size)


@pytest.mark.parametrize("backward_follows", [False, True])
def test_a_gradient_of_the_loss_is_a_factor_of_the_others(backward_follows: bool) -> None:
    x, weight, targets = made(11)
    loss = head_loss(x, weight, ParallelProduct("column", ALONE), HeadLoss(targets, 11, 0.5, backward_follows))
    (3 * loss).backward()
    _, x_wanted, weight_wanted = expected(11, 1.5)
    torch.testing.assert_close(x.grad, x_wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, weight_wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
@pytest.mark.parametrize("backward_follows", [False, True])
def test_what_is_frozen_gets_no_gradient(frozen: str, backward_follows: bool) -> None:
    x, weight, targets = made(11)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "input")
    queue = WeightGradQueue()
    queue.enabled = True
    head = ParallelProduct("column", ALONE, weight_grads=queue)
    loss = head_loss(x, weight, head, HeadLoss(targets, 11, 1.0, backward_follows))
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    run_deferred(queue.take())
    wanted, *gradients = expected(11, 1.0)
    torch.testing.assert_close(loss.detach(), wanted)
    for tensor, gradient in zip((x, weight), gradients, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, gradient, rtol=1e-5, atol=1e-6)
        else:
            assert tensor.grad is None


def test_a_loss_without_any_target_is_0_and_so_are_its_gradients() -> None:
    x, weight, targets = made(11)
    loss = head_loss(x, weight, ParallelProduct("column", ALONE), HeadLoss(torch.full_like(targets, IGNORED), 11))
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_in_bf16_many_blocks_lose_nothing_of_the_weights_gradient() -> None:
    x, weight, targets = made(3, torch.bfloat16)
    many = x.detach().repeat(256, 1, 1).requires_grad_()
    with blocks_of(16):
        loss = head_loss(many, weight, ParallelProduct("column", ALONE), HeadLoss(targets.repeat(256, 1), 3))
    loss.backward()
    wide, wide_weight = many.detach().float(), weight.detach().float().requires_grad_()
    logits = F.linear(wide, wide_weight).flatten(0, 1)
    F.cross_entropy(logits, targets.repeat(256, 1).flatten(), reduction="sum", ignore_index=IGNORED).backward()
    assert weight.grad is not None
    assert wide_weight.grad is not None
    off = (weight.grad.float() - wide_weight.grad).norm() / wide_weight.grad.norm()
    assert off < 0.01, off


class _Largest(TorchDispatchMode):
    """Records the most elements of a tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Runs an operator."""
        result = operation(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("backward_follows", [False, True])
def test_no_tensor_has_the_size_of_tokens_times_vocabulary(backward_follows: bool) -> None:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2048, 8, generator=drawn).requires_grad_()
    weight = torch.randn(32_768, 8, generator=drawn).requires_grad_()
    targets = torch.randint(0, 32_768, (1, 2048), generator=drawn)
    with _Largest() as largest:
        head_loss(
            x, weight, ParallelProduct("column", ALONE), HeadLoss(targets, 32_768, 1.0, backward_follows)
        ).backward()
    assert largest.elements == 512 * 32_768, "a block of 512 rows, whatever the number of rows"


def peak_beyond_gradients(num_rows: int, backward_follows: bool, dtype: torch.dtype, tp: Group) -> int:
    """Returns the most bytes that forward and backward hold beside inputs and their gradients."""
    drawn, vocab = torch.Generator().manual_seed(1), 64
    x = torch.randn(1, num_rows, 16, generator=drawn).to(dtype).requires_grad_()
    weight = torch.randn(vocab // tp.size, 16, generator=drawn).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (1, num_rows), generator=drawn)
    live = LiveBytes()
    with blocks_of(8192), live:
        head_loss(x, weight, ParallelProduct("column", tp), HeadLoss(targets, vocab, 1.0, backward_follows)).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return live.peak - x.grad.nbytes - weight.grad.nbytes


def growths(dtypes: Sequence[str]) -> list[float]:
    """Returns the ratios of the peaks of 32,768 and 8,192 rows, on a rank of the vocabulary."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    tp = Mesh.build(Layout(tp=size), num_kv_heads=size).tp if size > 1 else ALONE
    cases = [(follows, getattr(torch, dtype)) for follows in (False, True) for dtype in dtypes]
    return [peak_beyond_gradients(32_768, *case, tp) / peak_beyond_gradients(8_192, *case, tp) for case in cases]


def test_four_times_the_rows_take_5_percent_more_memory_at_most(rank_pool: RankPool) -> None:
    """Beside the inputs, their gradients, and the copies with which ranks of CPUs exchange 16 bits."""
    alone, ranks = growths(["float32", "bfloat16"]), rank_pool.run(growths, 2, dtypes=["float32"])
    assert max(*alone, *(each for found in ranks for each in found)) <= 1.05, (alone, ranks)


@given(num_rows=st.integers(0, 10_000), num_columns=st.integers(0, 10**6))
def test_blocks_cover_all_rows_once_and_have_few_elements(num_rows: int, num_columns: int) -> None:
    found = logits_blocks.logits_blocks(num_rows, num_columns)
    ends = [(block.start, min(block.stop, num_rows)) for block in found]
    assert [stop for _, stop in ends] == [*(start for start, _ in ends[1:]), *([num_rows] if num_rows else [])]
    assert all(low < high for low, high in ends)
    assert all(high - low <= max(512, 2**24 / max(1, num_columns)) for low, high in ends)
    assert [low for low, _ in ends[:1]] == ([0] if num_rows else [])
    assert all(first[1] == second[0] for first, second in pairwise(ends))
