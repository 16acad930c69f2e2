"""Attention's kernels against softmax in fp64 over the stored vectors, and the bits of a row against other batches."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from tk.core.casts import Array
from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kv_formats import KV_DTYPES, kv_format
from tk.infer.engine.step.running_plan import TokenSpan
from tk.tests.infer.engine.kernels.triton import one_step
from tk.tests.infer.engine.kernels.triton.one_step import BLOCK, Layer, as_tensors, attention_of, make_spans, on_device
from tk.tests.infer.engine.kernels.triton.where import DEVICE, ON_GPU

pytestmark = pytest.mark.triton
# On a GPU products of fp32 are three of TF32.
TOLERANCES = {torch.float32: 1e-5 if ON_GPU else 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LENGTHS = (300, 70)


class Filled:
    """A cache with two sequences, filled by the ATen backend, and random queries for each of their tokens."""

    def __init__(self, layer: Layer, lengths: Sequence[int] = LENGTHS) -> None:
        self.layer, self.cache = layer, layer.cache()
        for part in (
            part for kind in self.cache.parts(0) for part in kind
        ):  # data of earlier owners: NaN, if it can be
            part.fill_(torch.nan if part.is_floating_point() else 127)
        self.spans = make_spans([(0, length) for length in lengths])
        qkv = layer.draw(sum(lengths), 1)
        self.query = self.cache.rotate(layer.aten_appended(self.cache, qkv, self.spans)).flatten(1).to(layer.dtype)

    def run(
        self, bounds: Sequence[tuple[int, int, int]], window: int | None = None, split: bool = False
    ) -> torch.Tensor:
        """Returns the attention of spans (sequence, start, stop)."""
        spans, rows, first = [], [], 0
        for sequence, start, stop in bounds:
            spans.append(TokenSpan(first, start, stop, self.spans[sequence].block_table))
            rows.append(self.query[self.spans[sequence].first + start : self.spans[sequence].first + stop])
            first += stop - start
        query, attention = torch.cat(rows), attention_of(self.layer, self.cache)
        out = torch.full_like(query, torch.nan)
        if split:
            attention.decode(0, window, query, out, as_tensors(spans, 1), attention.scratch(len(spans)))
        else:
            attention.attend(0, window, query, out, as_tensors(spans, attention.tokens))
        return out

    def exact(self, bounds: Sequence[tuple[int, int, int]], window: int | None = None) -> torch.Tensor:
        """Returns the same as `run`, in fp64."""
        rows = [self._row(sequence, at, window) for sequence, start, stop in bounds for at in range(start, stop)]
        turned: torch.Tensor = torch.stack(rows)
        if self.cache.rotated_size > 1:
            turned = _turned_back(turned)
        return turned.flatten(1)

    def _row(self, sequence: int, position: int, window: int | None) -> torch.Tensor:
        span, layer = self.spans[sequence], self.layer
        low = 0 if window is None else max(0, position - window + 1)
        keys, values = (
            each[:, low : position + 1].double() for each in _stored(self.cache, span.block_table, position)
        )
        query = self.query[span.first + position].double().view(layer.kv_heads, -1, layer.dim)
        weights = torch.softmax(query @ keys.transpose(1, 2) * layer.dim**-0.5, dim=-1)
        return (weights @ values).flatten(0, 1)


def _turned_back(rows: torch.Tensor) -> torch.Tensor:
    from tk.tests.infer.engine.kernels.stored import hadamard

    return torch.from_numpy(hadamard(rows.cpu().numpy())).to(rows.device)


def _stored(cache: KVCache, table: Array, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values, [K, tokens, E], that a query reads, near ones from their twins."""
    blocks = on_device(table[: position // BLOCK + 1].astype("int64"))[None]
    keys, values = cache.read(0, cache.pages(blocks), blocks.shape[1])
    if not cache.has_twins:
        return keys, values
    key_twins, value_twins = cache.read_twins(0, cache.twins(blocks), blocks.shape[1])
    own = torch.arange(keys.shape[1], device=DEVICE) // BLOCK
    near = ((own == 0) | (own == position // BLOCK))[:, None]
    keys = keys if key_twins is None else torch.where(near, key_twins, keys)
    return keys, torch.where(near, value_twins, values)


def check(
    filled: Filled, bounds: Sequence[tuple[int, int, int]], window: int | None = None, split: bool = False
) -> None:
    found, expected = filled.run(bounds, window, split), filled.exact(bounds, window)
    tolerance = TOLERANCES[filled.layer.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


PROMPT, TOKENS = [(0, 250, 262), (1, 0, 5)], [(0, 299, 300), (1, 69, 70)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_format_equals_fp64(kv_dtype: str) -> None:
    filled = Filled(Layer(4, 2, 32, kv_dtype))
    check(filled, PROMPT)
    check(filled, TOKENS, split=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "int8", "int4"])
def test_models_of_two_bytes_equal_fp64(dtype: torch.dtype, kv_dtype: str) -> None:
    filled = Filled(Layer(2, 2, 32, kv_dtype, dtype))
    check(filled, PROMPT)
    check(filled, TOKENS, split=True)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 40), (20, 1, 48), (2, 1, 80), (7, 1, 128), (2, 1, 256)])
@pytest.mark.parametrize("kv_dtype", ["fp32", "k8v4"])
def test_heads_of_other_models_equal_fp64(heads: int, kv_heads: int, dim: int, kv_dtype: str) -> None:
    filled = Filled(Layer(heads, kv_heads, dim, kv_dtype))
    check(filled, PROMPT)
    check(filled, TOKENS, split=True)


@pytest.mark.parametrize("window", [1, 31, 100, 257])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int4"])
def test_windows_equal_fp64(window: int, kv_dtype: str) -> None:
    filled = Filled(Layer(2, 1, 32, kv_dtype))
    check(filled, PROMPT, window)
    check(filled, TOKENS, window, split=True)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("window", [None, 100])
def test_bits_of_a_row_depend_on_neither_its_batch_nor_its_cut(kv_dtype: str, window: int | None) -> None:
    assert kv_format(kv_dtype).name == kv_dtype
    filled = Filled(Layer(4, 2, 32, kv_dtype))
    whole = filled.run([(0, 240, 300)], window)
    cut = filled.run([(0, 240, 253), (1, 0, 9)], window), filled.run([(1, 3, 4), (0, 253, 300)], window)
    assert torch.equal(torch.cat([cut[0][:13], cut[1][1:]]), whole)
    alone = filled.run([(0, 299, 300)], window, split=True)
    assert torch.equal(filled.run([(1, 69, 70), (1, 40, 41), (0, 299, 300)], window, split=True)[2:], alone)


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
@pytest.mark.parametrize("block", [16, 4])
def test_bits_of_a_row_do_not_depend_on_the_cut_where_a_tile_has_several_blocks(
    kv_dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of keys then has the first block, read from its twin, beside others."""
    for name, value in (("BLOCK", block), ("TABLE", 80 // block), ("NUM_BLOCKS", 200 // block)):
        monkeypatch.setattr(one_step, name, value)
    filled = Filled(Layer(4, 2, 32, kv_dtype), (80, 30))
    whole = filled.run([(0, 0, 80)])
    for cuts in ((0, 3, 29, 45, 80), (0, 40, 41, 80), (0, 31, 70, 80)):
        parts = [filled.run([(0, first, stop)]) for first, stop in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole), cuts


def test_padding_of_a_batch_is_left_alone() -> None:
    """A span without tokens, as in a bucket of a graph, is not computed."""
    filled = Filled(Layer(2, 1, 32, "int8"))
    attention = attention_of(filled.layer, filled.cache)
    spans = as_tensors([TokenSpan(0, 299, 300, filled.spans[0].block_table)] * 2, 1)
    spans.length[1] = 0
    out, query = torch.full((2, 64), 7.0, device=DEVICE), filled.query[298:300]
    attention.decode(0, None, query, out, spans, attention.scratch(2))
    attention.attend(0, None, query, out, spans)
    assert out[0].ne(7).all()
    assert out[1].eq(7).all()
