"""Products by instructions for bf16: the bits of a model in numpy, for any number of rows and of threads."""

import platform
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tk.core.casts import Array, cast, widen
from tk.core.dtypes import BF16, FP16, FP32, DType
from tk.core.native.compiler import find_compilers
from tk.core.native.source import COMMON_FLAGS
from tk.infer.engine.kernels.native.binding.library import SOURCE
from tk.infer.engine.kernels.native.packing import Stack
from tk.infer.engine.kernels.native.self_check import why_not
from tk.tests.example_counts import sized
from tk.tests.infer.engine.kernels.native.numpy_model import round_to_bf16, sliced
from tk.tests.infer.engine.kernels.native.products import MODELS, ROWS, load, multiply
from tk.tests.infer.engine.kernels.native.running import logits, rank_logits, runner
from tk.tests.model.architectures import ENTRIES, VOCAB

pytestmark = pytest.mark.skipif(next(find_compilers(), None) is None, reason="no compiler")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 64).tolist()


def bf16(values: Array) -> Array:
    return widen(cast(values, FP32, BF16), BF16)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("inputs", "outputs", "slices"), [(64, 96, 1), (37, 21, 1), (96, 50, 8), (60, 33, 4), (2, 130, 2), (1216, 18, 1)]
)
def test_products_have_the_bits_of_the_numpy_model_for_every_number_of_rows(
    name: str, inputs: int, outputs: int, slices: int
) -> None:
    random, stack = np.random.default_rng(inputs), Stack(1, inputs, outputs, slices=slices)
    weight = random.standard_normal((outputs, inputs), np.float32)
    of_row = np.arange(512) % 37  # so many different rows: the numpy model is slow, and no tile has that height
    some = random.standard_normal((37, inputs), np.float32)
    x, expected = some[of_row], sliced(some, bf16(weight), slices, name)[of_row]
    for rows in ROWS if inputs < 1000 else ROWS[:-1]:
        assert np.array_equal(multiply(load(name), stack, weight, BF16, x[:rows]), expected[:rows]), rows


def extreme(random: np.random.Generator, *shape: int) -> Array:
    """Returns fp32 values, some denormal, some zero, whose products are normal, denormal, or less."""
    exponents = np.array([0, 0, 1, 2, 24, 63, 64, 100, 127, 130], np.uint32)
    bits = random.choice(exponents, shape) << 23 | random.integers(0, 2**23, shape, np.uint32)
    bits = np.where(random.random(shape) < 0.1, 0, bits) | random.integers(0, 2, shape, np.uint32) << 31
    values: Array = bits.astype(np.uint32).view(np.float32)
    return values


def test_denormal_values_and_sums_are_flushed_as_by_the_numpy_model(name: str) -> None:
    random = np.random.default_rng(3)
    weight, x = extreme(random, 80, 6), extreme(random, 200, 6)
    expected = sliced(x, bf16(weight), 1, name)
    assert np.array_equal(
        multiply(load(name), Stack(1, 6, 80), weight, BF16, x).view(np.int32), expected.view(np.int32)
    )
    exact = bf16(x).astype(np.float64) @ bf16(weight).T.astype(np.float64)
    assert ((expected == 0) & (exact != 0)).any(), "nothing was flushed"


def test_a_sum_that_is_denormal_at_24_bits_is_flushed(name: str) -> None:
    """2^-126 - 2^-150 is denormal, although rounding it to fp32's denormal numbers gives 2^-126."""
    x = np.array([[2.0**-63, 0, 2.0**-70, 0]], np.float32)
    weight = np.array([[2.0**-63, 0, -(2.0**-80), 0]], np.float32)
    assert (x * weight)[0, 0] == np.float32(2.0**-126 - 2.0**-150)
    assert multiply(load(name), Stack(1, 4, 1), weight, BF16, x) == sliced(x, weight, 1, name) == 0


def test_values_are_rounded_to_nearest_even_and_stay_nan(name: str) -> None:
    halves = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3.4e38, np.inf, 2.0**-127], np.float32)
    x = np.zeros((7, 6), np.float32)
    x[np.arange(6), np.arange(6)], x[6, 0] = halves, np.nan
    found = multiply(load(name), Stack(1, 6, 1), np.ones((1, 6), np.float32), BF16, x)[:, 0]
    assert found[:6].tolist() == [1, 1 + 2**-6, -1 - 2**-7, np.inf, np.inf, 0] == round_to_bf16(halves).tolist()
    assert np.isnan(found[6])


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=lambda dtype: dtype.name)
def test_other_weights_have_the_bits_of_plain_vectors(name: str, dtype: DType) -> None:
    random = np.random.default_rng(4)
    weight, x = random.standard_normal((40, 72), np.float32), random.standard_normal((19, 72), np.float32)
    wide, found = (multiply(load(each), Stack(1, 72, 40, slices=2), weight, dtype, x) for each in ("wide", name))
    assert np.array_equal(found, wide)


def test_kernels_on_models_pass_their_check(name: str) -> None:
    assert why_not(load(name)) == ""


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(
            *each, marks=() if each in (("dot_model", "mixtral"), ("amx_model", "llama3")) else pytest.mark.matrix
        )
        for each in product(MODELS, ("llama3", "mixtral", "qwen2 sliding"))
    ],
    indirect=["name"],
)
def test_bits_do_not_depend_on_cuts_and_threads(tmp_path: Path, name: str, architecture: str) -> None:
    ENTRIES[architecture].make(tmp_path)
    made = [runner(tmp_path, "bf16", "bf16", threads, name) for threads in range(1, 5, sized(1, 2))]
    expected = logits(made[0], TOKENS, range(1, 64))  # token by token
    for cuts in ((), (1, 18), (31, 32, 33, 63)):
        for each in made:
            assert np.array_equal(logits(each, TOKENS, cuts), expected)
    plain = runner(tmp_path, "bf16", "bf16", 1, "baseline")
    near = logits(plain, TOKENS, ())
    assert not np.array_equal(near, expected)
    close = np.abs(expected - near).max(axis=1) < 0.03 * np.abs(near).max()
    assert close.mean() > 0.8, "a router may choose another expert for a few tokens"
    for each in (*made, plain):
        each.close()


def test_ranks_agree(tmp_path: Path, name: str) -> None:
    ENTRIES["llama3"].make(tmp_path / "model")
    alone = runner(tmp_path / "model", "bf16", "bf16", instruction_set=name)
    expected = logits(alone, TOKENS, ())
    alone.close()
    found = rank_logits(tmp_path / "model", 2, tmp_path / "store", TOKENS, (1, 20), "bf16", name)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.03 * np.abs(expected).max())


@pytest.mark.matrix  # every build compiles them; this looks for the instructions
@pytest.mark.parametrize(
    ("unit", "instructions"),
    [("avx512_bf16", {"vdpbf16ps", "vcvtne2ps2bf16"}), ("amx", {"tdpbf16ps", "ldtilecfg", "tilerelease"})],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_compilers_accept_the_instructions(tmp_path: Path, unit: str, instructions: set[str]) -> None:
    compiler = next(find_compilers())
    source = next(each for each in SOURCE.units if each.name == unit)
    folder = source.source.parent
    flags = [
        *COMMON_FLAGS,
        "-O1",
        f"-I{folder}",
        *source.flags,
        "-S",
        str(source.source),
        "-o",
        str(tmp_path / "kernels.s"),
    ]
    assert compiler.run(flags, tmp_path) is None
    used = set(re.findall(r"^\s+([a-z0-9]+)", (tmp_path / "kernels.s").read_text(), re.MULTILINE))
    assert instructions <= used
