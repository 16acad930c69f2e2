"""Equalized keys on both backends: scores stay the same bits, and 4 bits lose less where channels are uneven."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tk.core.casts import Array
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.kv_formats import KVFormat
from tk.infer.engine.worker.worker import load
from tk.tests.infer.engine.kernels.native.running import NUM_BLOCKS, logits
from tk.tests.infer.engine.program.test_equalization import make_uneven, scale_keys
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.model.architectures import ENTRIES, VOCAB

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 64).tolist()  # most are read in 4 bits
CUTS = (30, 31, 47)
BACKENDS = ("aten", *(["native"] if instruction_sets() else []))
# For `make test`: keys that are rotated or not, with biases, norms or neither, of layers with windows or experts.
CHOSEN = {
    "aten": {("qwen2", "bf16"), ("qwen3", "fp32"), ("gpt2", "fp32")},
    "native": {
        *(("llama3", "fp32"), ("qwen2", "fp32"), ("qwen2 sliding", "fp32"), ("gpt2", "fp32")),
        *(("qwen3", "bf16"), ("qwen3_moe", "fp32")),
    },
}


def found(folder: Path, backend: str, kv_dtype: str, dtype: str = "fp32", weight_dtype: str = "") -> Array:
    """Returns the logits of every token."""
    job = Job(str(folder), backend, dtype, kv_dtype, NUM_BLOCKS, 0, BLOCK_SIZE, 512)
    made = load(replace(job, weight_dtype=weight_dtype))
    result = logits(made, TOKENS, CUTS)
    if isinstance(made, NativeRunner):
        made.close()
    return result


def equalize(monkeypatch: pytest.MonkeyPatch, whether: bool) -> None:
    monkeypatch.setattr(KVFormat, "is_equalized", property(lambda self: whether))


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        pytest.param(name, dtype, backend, marks=() if (name, dtype) in CHOSEN[backend] else pytest.mark.matrix)
        for name, dtype in [*((name, "fp32") for name in ENTRIES), ("qwen2", "bf16"), ("qwen3", "bf16")]
        for backend in BACKENDS
    ],
)
def test_scores_of_keys_that_are_not_rounded_stay_the_same_bits(
    tmp_path: Path, name: str, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_uneven(name, tmp_path)
    equalize(monkeypatch, False)
    expected = found(tmp_path, backend, dtype, dtype)
    equalize(monkeypatch, True)
    assert np.array_equal(found(tmp_path, backend, dtype, dtype), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_dtype", ["", "int8", "int4"])
def test_outliers_of_keys_change_no_bit_of_int4(tmp_path: Path, weight_dtype: str, backend: str) -> None:
    model = ENTRIES["llama3"].make(tmp_path / "plain")
    assert isinstance(model, LlamaForCausalLM)
    scale_keys(model, (1, 3), 8.0)
    model.save_pretrained(tmp_path / "outliers")
    plain, outliers = (
        found(tmp_path / each, backend, "int4", weight_dtype=weight_dtype) for each in ("plain", "outliers")
    )
    assert np.array_equal(plain, outliers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_int4_loses_less_than_without(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ENTRIES["llama3"].make(tmp_path)
    assert isinstance(model, LlamaForCausalLM)
    scale_keys(model, (1, 3), 8.0)
    model.save_pretrained(tmp_path)
    exact, errors = found(tmp_path, backend, "fp32"), []
    for whether in (False, True):
        equalize(monkeypatch, whether)
        errors.append(np.linalg.norm(found(tmp_path, backend, "int4") - exact))
    without, with_factors = errors
    assert with_factors < 0.7 * without


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bias_that_chooses_experts_is_fp32_in_a_model_of_bf16(tmp_path: Path, backend: str) -> None:
    """Biases decide alone, and are nearer to each other than numbers of bf16 are at 4096."""
    ENTRIES["glm4_moe ungrouped"].make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bias = 4096 + 1.5 * torch.arange(6)
    logits_of = {}
    for kind, value in (("exact", bias), ("rounded", bias.bfloat16().float())):
        changed = {name: value for name in tensors if name.endswith("e_score_correction_bias")}
        save_file(tensors | changed, file, {"format": "pt"})
        for dtype in ("fp32", "bf16"):
            logits_of[kind, dtype] = found(tmp_path, backend, dtype, dtype)
    scale = np.linalg.norm(logits_of["exact", "fp32"])
    assert np.linalg.norm(logits_of["exact", "bf16"] - logits_of["exact", "fp32"]) < 0.05 * scale
    assert np.linalg.norm(logits_of["rounded", "bf16"] - logits_of["exact", "bf16"]) > 0.2 * scale, "it must be seen"
