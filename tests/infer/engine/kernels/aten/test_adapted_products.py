"""Adapters on torch's operators: the logits of training's decoder, and bits that depend on a request alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tk.tests.infer.adapters import OWN, make_adapter, trained_logits
from tk.tests.infer.engine.kernels.adapted import JOB, alone, prompts, serving, together
from tk.tests.model.architectures import ENTRIES, VOCAB

MATRIX = pytest.mark.matrix
ATEN = replace(JOB, kernels="aten")


@pytest.mark.parametrize(
    "name",
    [
        *("llama3", "mixtral"),
        *(pytest.param(each, marks=MATRIX) for each in ("gpt2", "gpt2 untied", "qwen2", "qwen3", "qwen2_moe")),
    ],
)
def test_logits_are_those_of_training(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    ENTRIES[name].make(base)
    adapters = [
        make_adapter(tmp_path / str(rank), base, seed=rank, rank=rank, rslora=True, **more)
        for rank, more in ((3, {}), (16, OWN[name]))
    ]
    made, sequences = serving(base, adapters, ATEN), prompts(VOCAB)
    for found, (tokens, slot) in zip(together(made, sequences), sequences, strict=True):
        expected = trained_logits(base, None if slot < 0 else adapters[slot], tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "dtype", "weight_dtype"),
    [
        ("llama3", "bf16", ""),
        ("mixtral", "bf16", ""),
        *(pytest.param("llama3", *each, marks=MATRIX) for each in (("fp32", ""), ("bf16", "int4"))),
        *(pytest.param("mixtral", *each, marks=MATRIX) for each in (("fp32", ""), ("bf16", "int4"))),
    ],
)
def test_bits_depend_on_a_request_alone(tmp_path: Path, name: str, dtype: str, weight_dtype: str) -> None:
    base = tmp_path / "base"
    ENTRIES[name].make(base)
    adapters = [
        make_adapter(tmp_path / str(rank), base, seed=rank, rank=rank, **more)
        for rank, more in ((4, {}), (24, OWN[name]))
    ]
    job = replace(ATEN, dtype=dtype, kv_dtype=dtype, weight_dtype=weight_dtype or dtype)
    made, plain, sequences = serving(base, adapters, job), serving(base, [], job), prompts(VOCAB)
    expected = alone(made, sequences)
    assert np.array_equal(expected[1], together(plain, [sequences[1]])[0]), "a row without an adapter changed"
    assert not np.array_equal(expected[0], together(plain, [(sequences[0][0], -1)])[0])
    for steps in (1, 2, 5):
        for found, wanted in zip(together(made, sequences, steps), expected, strict=True):
            assert np.array_equal(found, wanted)
