"""Each format in Triton against the pages of the ATen backend: the same bits stored, and the same vectors read."""

import pytest
import torch
import triton
import triton.language as tl

from tk.infer.engine.kernels.aten.kv_cache import hadamard as expected_hadamard
from tk.infer.engine.kernels.aten.pages import make_pages
from tk.infer.engine.kernels.triton.cache import PageParts
from tk.infer.engine.kernels.triton.formats import read_vectors, store_vectors
from tk.infer.engine.kernels.triton.hadamard import hadamard
from tk.infer.engine.kernels.triton.tilings import width_of
from tk.infer.engine.kv_formats import KV_FORMATS, VectorFormat, hadamard_size
from tk.tests.infer.engine.kernels.triton.where import DEVICE

pytestmark = pytest.mark.triton
FORMATS = {each.keys.name: each.keys for each in KV_FORMATS}
LINES = 64


@triton.jit
def _store(pages: tl.tensor, x: tl.tensor, lines: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> None:
    row, columns = tl.arange(0, 64), tl.arange(0, WIDTH)[None, :]
    line = tl.load(lines + row)
    vectors = tl.load(x + row[:, None] * DIM + columns, mask=columns < DIM, other=0.0)
    store_vectors(pages, line, line >= 0, vectors, DIM, WIDTH)


@triton.jit
def _read(pages: tl.tensor, out: tl.tensor, lines: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> None:
    row, columns = tl.arange(0, 64), tl.arange(0, WIDTH)[None, :]
    line = tl.load(lines + row)
    vectors = read_vectors(pages, line, line >= 0, DIM, WIDTH, tl.float32)
    tl.store(out + row[:, None] * DIM + columns, vectors, mask=columns < DIM)


@triton.jit
def _transform(x: tl.tensor, out: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, 4)[:, None] * DIM + tl.arange(0, WIDTH)[None, :]
    mask = (tl.arange(0, WIDTH) < DIM)[None, :]
    tl.store(out + at, hadamard(tl.load(x + at, mask=mask, other=0.0), 4, WIDTH, SIZE), mask=mask)


def vectors(dim: int) -> torch.Tensor:
    """Returns fp32 vectors of many sizes: of zeros, of numbers halfway between others, and some beyond a format."""
    drawn = torch.randn(LINES, dim, generator=torch.Generator().manual_seed(dim))
    drawn *= torch.logspace(-9, 3, LINES)[:, None]
    drawn[0], drawn[1] = 0.0, torch.arange(dim) / 16
    drawn[2], drawn[3, 0], drawn[3, 1] = torch.arange(dim) * 2.0**-10, 1e4, -1e4
    return drawn.to(DEVICE)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [32, 33, 80, 128])
def test_vectors_are_stored_and_read_as_in_the_aten_backend(name: str, dim: int) -> None:
    format_: VectorFormat = FORMATS[name]
    shape = (LINES + 1, 1, 1, dim)
    expected, pages = (make_pages(shape, format_, DEVICE) for _ in range(2))
    lines = torch.randperm(LINES + 1, generator=torch.Generator().manual_seed(0))[:LINES].to(DEVICE)
    drawn, lines_there = vectors(dim), lines.clone()
    lines[5] = -1  # nothing is stored for it
    kept = torch.arange(LINES, device=DEVICE) != 5
    expected.write(lines[kept], drawn[kept])
    _store[(1,)](PageParts(*pages.parts), drawn, lines, dim, width_of(dim))
    for mine, theirs in zip(pages.parts, expected.parts, strict=True):
        assert torch.equal(mine, theirs)
    out = torch.full((LINES, dim), -1.0, device=DEVICE)
    _read[(1,)](PageParts(*pages.parts), out, lines, dim, width_of(dim))
    assert torch.equal(out[kept], expected.read(lines_there)[:, 0][kept])
    assert out[5].isfinite().all()


def test_every_8_bit_float_is_read() -> None:
    pages = make_pages((LINES, 1, 1, 32), FORMATS["fp8"], DEVICE)
    pages.parts[0].view(-1)[:256] = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out, lines = torch.zeros(LINES, 32, device=DEVICE), torch.arange(LINES, device=DEVICE)
    _read[(1,)](PageParts(*pages.parts), out, lines, 32, 32)
    torch.testing.assert_close(out, pages.read(lines)[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_does_not_come_back_finite(name: str, bad: float) -> None:
    """Attention must show a broken activation, not hide it; 8-bit floats store infinity as their largest number."""
    pages, drawn = make_pages((LINES, 1, 1, 64), FORMATS[name], DEVICE), torch.randn(LINES, 64, device=DEVICE)
    drawn[7, 3], lines = bad, torch.arange(LINES, device=DEVICE)
    _store[(1,)](PageParts(*pages.parts), drawn, lines, 64, 64)
    back = pages.read(lines)[:, 0]
    assert back[8].isfinite().all()
    assert back[7, 3] == 448 if (name, bad) == ("fp8", torch.inf) else not back[7, 3].isfinite()


@pytest.mark.parametrize("dim", [32, 40, 80, 96, 128, 256])
def test_the_transform_has_the_bits_of_the_aten_backend(dim: int) -> None:
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(dim)).to(DEVICE)
    out = torch.zeros_like(x)
    _transform[(1,)](x, out, dim, width_of(dim), hadamard_size(dim))
    assert torch.equal(out, expected_hadamard(x))
