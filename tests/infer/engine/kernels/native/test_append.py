"""What is stored of a token: that of numpy, on both backends, which compute the same from the same bytes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tk.core.casts import Array, widen
from tk.core.dtypes import FP8_E4M3
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.aten.model_runner import ModelRunner
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kv_formats import FP8, GROUP, INT4, INT8, KV_DTYPES, VectorFormat, kv_format
from tk.infer.engine.worker.worker import load
from tk.tests.infer.engine.kernels.native.running import BEST, NUM_BLOCKS, logits, runner
from tk.tests.infer.engine.kernels.native.test_attention import TOKENS, decode, make
from tk.tests.infer.engine.kernels.stored import Parts, hadamard, in_aten, in_native
from tk.tests.infer.engine.program.test_equalization import scale_keys
from tk.tests.infer.history import BLOCK_SIZE

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LENGTH = 100
USED = slice(1, 1 + LENGTH // BLOCK_SIZE)  # blocks that are full
CLOSE = 1e-3  # to a rounding border, in steps
SHAPES = [(6, 16), (1, 64), (2, 80), (3, 24)]  # query heads, head dim: with one kv head for three query heads


def aten(folder: Path, kv_dtype: str) -> ModelRunner:
    made = load(Job(str(folder), "aten", "fp32", kv_dtype, NUM_BLOCKS, 0, BLOCK_SIZE, 512))
    assert isinstance(made, ModelRunner)
    return made


def stored(folder: Path, kv_dtype: str, instruction_set: str) -> list[Parts]:
    """Returns the keys, the values and their copies that native kernels store of LENGTH tokens."""
    made = runner(folder, "fp32", kv_dtype, 2, instruction_set)
    logits(made, TOKENS[:LENGTH], (30, 31, 32, 57))
    found = in_native(made)
    made.close()
    return found


def stored_by_aten(folder: Path, kv_dtype: str) -> list[Parts]:
    made = aten(folder, kv_dtype)
    logits(made, TOKENS[:LENGTH], ())
    return [tuple(part.numpy() for part in parts) for parts in in_aten(made)]


def key_factors(folder: Path) -> Array:
    """Returns what keys are divided by, [kv heads, E], which tests/infer/engine/program/test_equalization.py checks."""
    made = runner(folder, "fp32", "int4")
    made.close()
    factors = made._weights.key_factors[0]
    assert len(np.unique(factors)) > 1
    return factors


def check_codes(format_: VectorFormat, exact: Array, parts: Parts) -> None:
    """Compares what is stored of exact vectors [blocks, kv heads, block_size, E] with numpy's."""
    elements = parts[0][USED]
    if format_ == INT4:
        codes = np.stack([elements & 15, elements >> 4], axis=-1).reshape(exact.shape).astype(np.float64)
        scales, zeros = (part[USED].astype(np.float64) for part in parts[1:])
        for g, rotated in enumerate(np.split(hadamard(exact), range(GROUP, exact.shape[-1], GROUP), axis=-1)):
            scale, zero = scales[..., g : g + 1], zeros[..., g : g + 1]
            low, high = rotated.min(-1, keepdims=True), rotated.max(-1, keepdims=True)
            assert (np.abs(zero - low) <= 2.0**-11 * 1.01 * np.abs(low)).all(), "rounded to fp16"
            assert (np.abs(scale - (high - zero) / 15) <= 2.0**-11 * 1.01 * scale).all(), "rounded to fp16"
            wanted = np.clip((rotated - zero) / scale, 0, 15)
            assert (np.abs(codes[..., g * GROUP : (g + 1) * GROUP] - wanted) <= 0.5 + CLOSE).all()
    elif format_ == FP8:
        values = widen(elements, FP8_E4M3)
        known = np.unique(widen(np.arange(255, dtype=np.uint8), FP8_E4M3)[np.arange(255) != 127])
        steps = np.diff(known)[np.clip(np.searchsorted(known, exact) - 1, 0, len(known) - 2)]
        assert (np.abs(values - exact) <= (0.5 + CLOSE) * steps).all()
    else:
        scales = parts[1][USED][..., None].astype(np.float64)
        rotated = hadamard(exact)
        np.testing.assert_allclose(scales, np.abs(rotated).max(-1, keepdims=True) / 127, rtol=1e-4)
        assert (np.abs(elements - rotated / scales) <= 0.5 + CLOSE).all()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_dtype", "instruction_set"),
    [
        pytest.param(*shape, kv_dtype, name, marks=() if name == BEST or i == j else pytest.mark.matrix)
        for i, shape in enumerate(SHAPES)
        for j, kv_dtype in enumerate(("fp8", "int8", "int4", "k8v4"))
        for name in instruction_sets()
    ],
)
def test_codes_are_those_of_numpy(
    tmp_path: Path, heads: int, head_dim: int, kv_dtype: str, instruction_set: str
) -> None:
    scale_keys(make(tmp_path, None, heads, head_dim), (1, 3), 8.0).save_pretrained(tmp_path)
    exact = stored(tmp_path, "fp32", instruction_set)
    found = (stored(tmp_path, kv_dtype, instruction_set), stored_by_aten(tmp_path, kv_dtype))
    format_ = kv_format(kv_dtype)
    if format_.is_equalized:
        exact[0] = (exact[0][0] / key_factors(tmp_path)[:, None],)
    kinds = [(format_.keys, exact[0]), (format_.values, exact[1])]
    kinds += [(INT8, vectors) for kind, vectors in kinds if kind == INT4]
    for backend in found:
        for (kind, vectors), parts in zip(kinds, backend, strict=True):
            check_codes(kind, vectors[0][USED], parts)


def test_fp8_is_that_of_torch(tmp_path: Path) -> None:
    """Keys and values of 1e-4 to 1e4, which are more than the format holds, have torch's bits."""
    model = make(tmp_path, None, 6, 16)
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        for weight in (attention.k_proj.weight, attention.v_proj.weight):
            weight *= torch.logspace(-4, 4, len(weight))[:, None]
    model.save_pretrained(tmp_path)
    for instruction_set in instruction_sets():
        exact, rounded = (stored(tmp_path, name, instruction_set) for name in ("fp32", "fp8"))
        for vectors, parts in zip(exact, rounded, strict=True):
            expected = torch.from_numpy(vectors[0].copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert np.array_equal(parts[0], expected.view(torch.uint8).numpy())


def check_agreement(folder: Path, heads: int, head_dim: int, kv_dtype: str, instruction_set: str) -> None:
    """Compares the logits of a model in fp32, of one token more behind a full block and within one, with aten's."""
    make(folder, None, heads, head_dim)
    native, oracle = runner(folder, "fp32", kv_dtype, 1, instruction_set), aten(folder, kv_dtype)
    logits(native, TOKENS[:600], (500,))
    for mine, others in zip(in_native(native), in_aten(oracle), strict=True):
        for part, other in zip(mine, others, strict=True):
            other.copy_(torch.from_numpy(np.ascontiguousarray(part)).view(other.dtype))
    for length in (600, 601):
        found, expected = (decode(made, [(length, 1)]) for made in (native, oracle))
        assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)
    native.close()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(6, 16), (2, 80), pytest.param(3, 24, marks=pytest.mark.matrix)])
def test_backends_agree_on_the_same_stored_bytes(tmp_path: Path, heads: int, head_dim: int, kv_dtype: str) -> None:
    check_agreement(tmp_path, heads, head_dim, kv_dtype, BEST)


@pytest.mark.parametrize("instruction_set", instruction_sets()[:-1])
@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.matrix), "int4", "k8v4"])
def test_backends_agree_with_any_instruction_set(tmp_path: Path, kv_dtype: str, instruction_set: str) -> None:
    check_agreement(tmp_path, 2, 80, kv_dtype, instruction_set)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_backends_agree_with_wide_vectors(tmp_path: Path, wide: str, kv_dtype: str) -> None:
    check_agreement(tmp_path, 2, 80, kv_dtype, wide)
