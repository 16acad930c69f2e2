"""Paged attention against torch's own on the same keys and values, and its bits against other batches and cuts."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tk.core.casts import Array
from tk.infer.engine.kernels.aten.attention import plan
from tk.infer.engine.kernels.aten.kv_cache import KVCache, hadamard
from tk.infer.engine.kernels.aten.paged_attention import PagedAttention
from tk.infer.engine.kernels.aten.pages import CPU, make_pages
from tk.infer.engine.kernels.step_tensors import StepTensors
from tk.infer.engine.kv_formats import INT8, VectorFormat, kv_format
from tk.infer.engine.step.running_plan import TokenSpan

BLOCK, NUM_BLOCKS = 32, 64
LENGTH = 600  # three tiles


class Case:
    """Random queries, keys and values of one sequence, and a cache to compute its attention in any cut."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, kv_dtype: str, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(3)
        self.heads, self.kv_heads, self.head_dim, self.kv_dtype = heads, kv_heads, head_dim, kv_dtype
        self.q, self.k, self.v = (
            torch.randn(LENGTH, count, head_dim, generator=draw).to(dtype) for count in (heads, kv_heads, kv_heads)
        )

    def run(
        self, cuts: list[int], num_others: int = 0, garbage: bool = False, window: int | None = None
    ) -> torch.Tensor:
        """Output [LENGTH, H, E], computed in chunks, each beside the decoding of other sequences."""
        cache = KVCache(1, NUM_BLOCKS, self.kv_heads, BLOCK, self.head_dim, self.kv_dtype)
        order = np.random.default_rng(len(cuts)).permutation(NUM_BLOCKS).astype(np.int32) + 1
        if garbage:  # the data of earlier owners
            for block in order:
                self._append(cache, np.array([block]), np.arange(BLOCK), torch.full_like(self.k[:BLOCK], torch.nan))
        table, others = order[:20], [order[20 + i * 10 : 30 + i * 10] for i in range(num_others)]
        outputs = []
        for stop, length in zip(accumulate(cuts), cuts, strict=True):
            start = stop - length
            slots = [_slots(table, np.arange(start, stop))]
            spans = [TokenSpan(0, start, stop, table)]
            parts = [self.q[start:stop]], [self.k[start:stop]], [self.v[start:stop]]
            for i, other in enumerate(others):
                position = start % 290
                slots.append(_slots(other, np.array([position])))
                spans.append(TokenSpan(length + i, position, position + 1, other))
                for part, source in zip(parts, (self.q, self.k, self.v), strict=True):
                    part.append(source[(start + 7 * i) % LENGTH][None])
            numbers = StepTensors(CPU)
            attention = PagedAttention(cache, spans, np.concatenate(slots), self.heads, {window}, numbers)
            numbers.send()
            q, k, v = (torch.cat(part) for part in parts)
            attention.append(0, k, v)
            outputs.append(attention.attend(0, window, q)[:length])
        return torch.cat(outputs)

    def _append(self, cache: KVCache, table: Array, positions: Array, values: torch.Tensor) -> None:
        slots, begun = (torch.from_numpy(each) for each in (_slots(table, positions), table.astype(np.int64)))
        cache.append(0, cache.places(slots, begun), values, values)


def _slots(table: Array, positions: Array) -> Array:
    slots: Array = table[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return slots


def exact(case: Case, k: torch.Tensor, v: torch.Tensor, window: int = LENGTH) -> torch.Tensor:
    """torch's causal attention in float64."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in (case.q, k, v))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - window)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)


def stored(x: torch.Tensor, format_: VectorFormat, is_rotated: bool) -> torch.Tensor:
    """Vectors [T, K, E] as they come back from pages of a format."""
    pages = make_pages((len(x), x.shape[1], 1, x.shape[2]), format_, CPU)
    pages.write(torch.arange(x.shape[0] * x.shape[1]), (hadamard(x) if is_rotated else x).flatten(0, 1))
    back = pages.read(torch.arange(x.shape[0] * x.shape[1])).view(x.shape)
    return hadamard(back) if is_rotated else back


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 40), (20, 1, 8)])
def test_equals_torch(heads: int, kv_heads: int, head_dim: int) -> None:
    case = Case(heads, kv_heads, head_dim, "fp32", torch.float32)
    expected = exact(case, case.k, case.v)
    for cuts in ([LENGTH], [300, *[1] * 20, 280]):
        torch.testing.assert_close(case.run(cuts).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 40, 256, 300, LENGTH])
def test_a_window_equals_torch_and_changes_no_bits_by_company_or_cut(window: int) -> None:
    """Tiles of 256 keys before the window are left out, others partly hidden."""
    case = Case(4, 2, 16, "fp32", torch.float32)
    alone = case.run([LENGTH], window=window)
    torch.testing.assert_close(alone.double(), exact(case, case.k, case.v, window), rtol=1e-5, atol=1e-5)
    assert torch.equal(case.run([300, *[1] * 20, 280], num_others=2, window=window), alone)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "fp8", "int8"])
def test_it_reads_the_keys_of_the_current_chunk_too(kv_dtype: str) -> None:
    case = Case(4, 2, 16, kv_dtype, torch.float32)
    format_ = kv_format(kv_dtype)
    k, v = (stored(x, kind, format_.is_rotated) for x, kind in ((case.k, format_.keys), (case.v, format_.values)))
    torch.testing.assert_close(case.run([LENGTH]).double(), exact(case, k, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8", "int8", "int4", "k8v4"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.matrix), torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 16), pytest.param(20, 1, 24, marks=pytest.mark.matrix)]
)
def test_bits_depend_on_the_past_alone(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(heads, kv_heads, head_dim, kv_dtype, dtype)
    whole = case.run([LENGTH])
    for cuts in ([256, 256, 88], [505, *[1] * 20, 75], [3] * 10 + [570], [253, 1, 1, 1, 1, 1, 342]):
        assert torch.equal(case.run(cuts), whole), cuts
        assert torch.equal(case.run(cuts, num_others=3), whole), cuts
    monkeypatch.setattr(plan, "_MAX_READ", 1)  # one tile of all sequences at a time
    assert torch.equal(case.run([250, *[1] * 10, 340], num_others=2), whole)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
def test_nothing_of_an_earlier_owner_is_seen(kv_dtype: str) -> None:
    case = Case(4, 2, 16, kv_dtype, torch.float32)
    cuts = [260, *[1] * 8, 332]
    assert torch.equal(case.run(cuts, num_others=2, garbage=True), case.run(cuts, num_others=2))


@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4"])
def test_near_and_first_keys_are_read_in_8_bits(kv_dtype: str) -> None:
    """Each query sees its own block and the sequence's first one as int8, and the others as 4 bits."""
    case, format_ = Case(4, 2, 16, kv_dtype, torch.float32), kv_format(kv_dtype)
    found = case.run([LENGTH])
    kinds = ((case.k, format_.keys), (case.v, format_.values))
    (k, v), (near_k, near_v) = ([stored(x, kind or given, True) for x, given in kinds] for kind in (None, INT8))
    for query in (0, 31, 32, 100, 599):
        own = torch.arange(LENGTH) // BLOCK
        near = ((own == 0) | (own == query // BLOCK))[:, None, None]
        expected = exact(case, torch.where(near, near_k, k), torch.where(near, near_v, v))[query]
        torch.testing.assert_close(found[query].double(), expected, rtol=1e-5, atol=1e-5)


def test_bytes_of_the_cache() -> None:
    whole = {name: KVCache(2, 9, 3, 32, 16, name).num_bytes for name in ("fp32", "bf16", "fp8", "int8", "k8v4")}
    vectors = 2 * 2 * 10 * 3 * 32
    assert whole == {
        "fp32": vectors * 64,
        "bf16": vectors * 32,
        "fp8": vectors * 16,
        "int8": vectors * (16 + 4),
        "k8v4": vectors // 2 * (20 + 12 + 20),
    }
