"""Rotate and append against the ATen backend: equal queries, and equal bits in pages and twins."""

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.aten.pages import CPU
from tk.infer.engine.kernels.triton.append import HeadWeights
from tk.infer.engine.kv_formats import KV_DTYPES
from tk.model.spec import Rope
from tk.tests.infer.engine.kernels.triton.one_step import Layer, make_spans
from tk.tests.infer.engine.kernels.triton.where import DEVICE, ON_GPU

pytestmark = pytest.mark.triton


def check(layer: Layer, codes: int = 0) -> None:
    """Stores a few tokens of two sequences in both backends; integers may differ by `codes`, and by one on a GPU.

    A GPU fuses products and sums. The backend computes on the CPU, where it rounds after each operation.
    """
    codes = max(codes, int(ON_GPU))
    spans = make_spans([(30, 36), (5, 6)])
    qkv, mine, theirs = layer.draw(7), layer.cache(), layer.cache(device=CPU)
    query = layer.appended(mine, qkv, spans)
    expected = theirs.rotate(layer.aten_appended(theirs, qkv, spans)).flatten(1).to(layer.dtype)
    torch.testing.assert_close(query.cpu(), expected, rtol=codes * 1e-6, atol=codes * 1e-6)
    for kind, stored in zip(mine.parts(0), theirs.parts(0), strict=True):
        for part, expected_part in zip(kind, stored, strict=True):
            assert expected_part.any()
            difference = (part.cpu().double() - expected_part.double()).abs()
            assert difference.max() <= (codes if part.dtype == torch.int8 else codes * 1e-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_heads_are_rotated_and_stored_with_the_bits_of_the_aten_backend(kv_dtype: str, dtype: torch.dtype) -> None:
    check(Layer(4, 2, 40, kv_dtype, dtype))


@pytest.mark.parametrize("rope", [None, Rope(theta=1e6, share=0.5)], ids=["no rotation", "half"])
def test_rotations_of_other_models(rope: Rope | None) -> None:
    check(Layer(3, 3, 32, "int8", rope=rope))


def test_keys_are_equalized_and_queries_in_turn() -> None:
    factors = torch.exp2(torch.randint(-8, 8, (2, 32), generator=torch.Generator().manual_seed(2)).float()).to(DEVICE)
    check(Layer(4, 2, 32, "int4", weights=HeadWeights(factors=factors)))


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_heads_are_normed(kv_dtype: str) -> None:
    """A mean has other sums than torch's, so the last bit may differ, and a code by one."""
    weights = HeadWeights(torch.rand(48, device=DEVICE) + 0.5, torch.rand(48, device=DEVICE) + 0.5, eps=1e-5)
    check(Layer(4, 1, 48, kv_dtype, weights=weights), codes=1)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int4"])
def test_padding_is_not_stored(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tk.tests.infer.engine.kernels.triton import one_step

    layer = Layer(2, 1, 32, kv_dtype)
    cache = layer.cache()
    monkeypatch.setattr(one_step, "slots_of", lambda spans: np.full(3, -1))
    layer.appended(cache, layer.draw(3), make_spans([(0, 3)]))
    assert not any(part.any() for kind in cache.parts(0) for part in kind)


def test_blocks_without_a_twin_store_none() -> None:
    """Of a cache with few twins, only blocks of a plan have one."""
    layer, spans = Layer(2, 1, 32, "int4"), make_spans([(30, 34)])
    cache = layer.cache(num_twins=2)
    first, second = (int(each) for each in spans[0].block_table[:2])
    cache.assign(torch.tensor([[second, 2]], device=DEVICE), torch.empty(0, 2, dtype=torch.int64, device=DEVICE))
    layer.appended(cache, layer.draw(4), spans)
    twins = cache.parts(0).key_twins[0]
    assert cache.parts(0).keys[0][first].any()
    assert twins[2].any()
    assert not twins[:2].any()
