"""Kernels that compute wrong products are not used; vectors of 16 floats run everywhere through the compiler."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.core.errors import ConfigError
from tk.infer.engine.kernels.native import prepare
from tk.infer.engine.kernels.native.binding.library import Kernels, instruction_sets, load_kernels
from tk.infer.engine.kernels.native.self_check import why_not
from tk.tests.infer.engine.kernels.native.running import logits, runner
from tk.tests.model.architectures import ENTRIES, LENGTH, VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")


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


@pytest.fixture
def kernels() -> Kernels:
    found = load_kernels("baseline")
    assert found is not None
    return found


def _wrong(right: Callable[..., Any]) -> Callable[..., Any]:
    def multiply(matrix: Any, x: int, stride: int, rows: int, out: int, out_stride: int) -> None:
        right(matrix, x, stride, max(1, rows - 1), out, out_stride)  # the last row is left out

    return multiply


def test_wrong_products_are_seen(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert why_not(kernels) == ""
    broken = replace(kernels, multiply=_wrong(kernels.multiply))
    assert why_not(broken) == "their fp32 products of 2 rows are wrong"
    unpacked = replace(kernels, pack_codes=lambda matrix, codes, headers: None)
    assert why_not(unpacked) == "their fp32 products of 1 rows with weights of 8 bits are wrong"
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "avx2"))
    monkeypatch.setattr(prepare, "load_kernels", {"baseline": kernels, "avx2": broken}.get)
    assert prepare._kernels("", "fp32") is kernels
    assert "avx2 are not used on this machine: their fp32 products of 2 rows are wrong." in caplog.text
    with pytest.raises(ConfigError, match="cannot run native kernels for avx2"):
        prepare._kernels("avx2", "fp32")


def test_instructions_that_the_machine_refuses_are_not_used(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = replace(kernels, instruction_set="amx", refusal=lambda: b"the system does not permit tiles of AMX")
    better = replace(kernels, instruction_set="avx512_bf16")
    sets = {"baseline": kernels, "avx512_bf16": better, "amx": refused}
    monkeypatch.setattr(prepare, "instruction_sets", lambda: tuple(sets))
    monkeypatch.setattr(prepare, "load_kernels", sets.get)
    assert prepare._kernels("", "bf16") is better
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["The kernels for amx are not used on this machine: the system does not permit tiles of AMX."]
    assert prepare._kernels("", "fp32") is prepare._kernels("", "fp16") is kernels, "they have no such products"
    assert prepare._kernels("avx512_bf16", "fp32") is better, "but they may be asked for"
