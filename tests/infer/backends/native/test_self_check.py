"""Kernels that compute wrong products are not used; vectors of 16 floats run everywhere through the compiler."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.core.errors import ConfigError
from tk.core.native import NativeUnit
from tk.infer.backends.native import library, prepare
from tk.infer.backends.native.library import SOURCE, instruction_sets, load_kernels
from tk.infer.backends.native.self_check import products_are_right
from tk.tests.infer.backends.native.running import logits, runner
from tk.tests.model.architectures import ENTRIES, LENGTH, VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a unit with vectors of 16 floats: the code of AVX-512 without its instructions."""
    base = SOURCE.units[0]
    unit = NativeUnit("wide", base.source, ("-DTK_NAME=wide", "-DTK_WIDTH=16"))
    monkeypatch.setattr(library, "SOURCE", replace(SOURCE, name="wide", units=(base, unit, *SOURCE.units[-2:])))
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "wide"))
    return "wide"


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe", "gpt2"])
def test_wide_vectors_give_the_logits_of_narrow_ones(tmp_path: Path, wide: str, name: str) -> None:
    ENTRIES[name].make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, LENGTH).tolist()
    found = []
    for instruction_set in ("baseline", wide):
        made = runner(tmp_path, "fp32", "fp32", 2, instruction_set)
        whole = logits(made, tokens, ())
        assert np.array_equal(logits(made, tokens, (1, 2, 5, 22)), whole)
        found.append(whole)
        made.close()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-3 * np.abs(found[0]).max())


def _wrong(right: Callable[..., Any]) -> Callable[..., Any]:
    def multiply(matrix: Any, x: int, stride: int, rows: int, out: int, out_stride: int) -> None:
        right(matrix, x, stride, max(1, rows - 1), out, out_stride)  # the last row is left out

    return multiply


def test_wrong_products_are_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kernels = load_kernels("baseline")
    assert kernels is not None
    assert products_are_right(kernels)
    broken = replace(kernels, multiply=_wrong(kernels.multiply))
    assert not products_are_right(broken)
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "avx2"))
    monkeypatch.setattr(prepare, "load_kernels", {"baseline": kernels, "avx2": broken}.get)
    assert prepare._kernels("") is kernels
    assert "avx2 compute wrong products" in caplog.text
    with pytest.raises(ConfigError, match="cannot run native kernels for avx2"):
        prepare._kernels("avx2")
