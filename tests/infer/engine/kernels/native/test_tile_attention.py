"""Attention by tiles of AMX, on the CPU's own where it has them and on the model of their instructions anywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.core.casts import Array
from tk.core.native.compiler import find_compilers
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.native import prepare
from tk.infer.engine.kernels.native.binding import library
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.worker.worker import load
from tk.tests.infer.engine.kernels.native.products import portable
from tk.tests.infer.engine.kernels.native.running import logits
from tk.tests.infer.engine.kernels.native.test_attention import make
from tk.tests.model.architectures import VOCAB

pytestmark = pytest.mark.skipif(next(find_compilers(), None) is None, reason="no compiler")
BLOCK_SIZE = 32  # tiles need blocks of whole steps
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 1100).tolist()
CUTS = ((), (1, 2, 3, 40), (31, 32, 33, 100, 200, 255, 256, 257), (160,))
SHAPES = [(6, 32, None), (3, 64, 100), (1, 96, None)]  # query heads, head size, window
FORMATS = ["bf16", "fp8", "int8", "k8v4", "int4"]


def cases(first: int) -> list[Any]:
    """Each format with one shape, of which the first one's is given, and in `make test-all` with the others."""
    return [
        pytest.param(*shape, kv_dtype, marks=() if (first + i) % len(SHAPES) == j else pytest.mark.matrix)
        for i, kv_dtype in enumerate(FORMATS)
        for j, shape in enumerate(SHAPES)
    ]


@pytest.fixture(params=["amx_model", "amx"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of kernels with tiles."""
    if request.param == "amx":
        if "amx" not in instruction_sets():
            pytest.skip("this CPU has no AMX")
        return "amx"
    monkeypatch.setattr(library, "SOURCE", portable())
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "wide", "dot_model", "amx_model"))
    return "amx_model"


def runner(folder: Path, name: str, kv_dtype: str, threads: int = 1) -> NativeRunner:
    made = load(Job(str(folder), "native", "bf16", kv_dtype, 80, 0, BLOCK_SIZE, 512, 1, 0, "", threads, name))
    assert isinstance(made, NativeRunner)
    return made


def all_logits(made: NativeRunner, num_tokens: int, cuts: tuple[int, ...]) -> Array:
    steps = sorted({*cuts, *range(500, num_tokens, 500)})  # a step has at most 512 tokens
    found = logits(made, TOKENS[:num_tokens], steps, block_size=BLOCK_SIZE)
    made.close()
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize(("heads", "head_dim", "window", "kv_dtype"), cases(first=1))
def test_bits_do_not_depend_on_cuts_and_threads(
    tmp_path: Path, name: str, heads: int, head_dim: int, window: int | None, kv_dtype: str
) -> None:
    make(tmp_path, window, heads, head_dim)
    num_tokens = 1100 if name == "amx" else 300  # over a split's border where it is quick
    whole = all_logits(runner(tmp_path, name, kv_dtype), num_tokens, ())
    assert np.isfinite(whole).all()
    for threads, cuts in zip((1, 2, 3, 4), CUTS, strict=True):
        assert np.array_equal(all_logits(runner(tmp_path, name, kv_dtype, threads), num_tokens, cuts), whole), (
            threads,
            cuts,
        )


@pytest.mark.parametrize(("heads", "head_dim", "window", "kv_dtype"), cases(first=0))
def test_tiles_give_what_vectors_give_but_for_the_rounding_of_queries_and_weights(
    tmp_path: Path, name: str, heads: int, head_dim: int, window: int | None, kv_dtype: str
) -> None:
    make(tmp_path, window, heads, head_dim)
    num_tokens = 1100 if name == "amx" else 300
    by_tiles = all_logits(runner(tmp_path, name, kv_dtype), num_tokens, ())
    vectors = {"amx_model": "dot_model", "amx": "avx512_bf16"}[name]
    by_vectors = all_logits(runner(tmp_path, vectors, kv_dtype), num_tokens, ())
    assert not np.array_equal(by_tiles, by_vectors)
    assert np.linalg.norm(by_tiles - by_vectors) < 1e-2 * np.linalg.norm(by_vectors)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_cpu_with_amx_gives_what_the_model_of_its_tiles_gives(
    tmp_path: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "amx" not in instruction_sets():
        pytest.skip("this CPU has no AMX")
    make(tmp_path, None, 3, 64)
    real = all_logits(runner(tmp_path, "amx", kv_dtype), 200, (70,))
    monkeypatch.setattr(library, "SOURCE", portable())
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "wide", "amx_model"))
    np.testing.assert_allclose(all_logits(runner(tmp_path, "amx_model", kv_dtype), 200, (70,)), real, rtol=0, atol=1e-4)
