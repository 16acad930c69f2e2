"""Adapters on native kernels: the logits of training's decoder, the same bits in company and at every tp."""

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.infer.engine.job import Job
from tk.infer.engine.kernels.native import prepare
from tk.infer.engine.kernels.native.binding import library
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.model_runner import NativeRunner
from tk.infer.engine.request.adapter_lease import AdapterLease
from tk.infer.engine.step.running_plan import NO_ADAPTER
from tk.tests.infer.adapters import OWN, make_adapter, trained_logits
from tk.tests.infer.engine.kernels.adapted import JOB, over_ranks, prompts, put, serving, together
from tk.tests.infer.engine.kernels.native.products import MODELS, portable
from tk.tests.infer.history import History
from tk.tests.infer.oracle import Oracle
from tk.tests.model.architectures import ENTRIES, VOCAB
from tk.tests.model.lora import peft_adapters

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
MATRIX = pytest.mark.matrix


def make(folder: Path, name: str = "llama3", **options: int) -> tuple[Path, list[Path]]:
    """Returns the folders of a model and of two adapters, the second one with what was trained whole."""
    base = folder / "base"
    replace(ENTRIES[name], options=ENTRIES[name].options | options).make(base)
    factors = make_adapter(folder / "3", base, seed=3, rank=3, rslora=True)
    return base, [factors, make_adapter(folder / "20", base, seed=20, rank=20, rslora=True, **OWN[name])]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3", {}),
        ("gpt2", {}),
        pytest.param("llama3", {"intermediate_size": 40}, marks=MATRIX),
        ("mixtral", {}),
        *(pytest.param(each, {}, marks=MATRIX) for each in ("gpt2 untied", "qwen2", "qwen3", "mistral")),
        *(pytest.param(each, {}, marks=MATRIX) for each in ("qwen2_moe", "qwen3_moe", "glm4_moe")),
        pytest.param("mixtral", {"intermediate_size": 40}, marks=MATRIX),
    ],
)
def test_logits_are_those_of_training(tmp_path: Path, name: str, options: dict[str, int]) -> None:
    base, adapters = make(tmp_path, name, **options)
    made, sequences = serving(base, adapters, replace(JOB, threads=2)), prompts(VOCAB)
    for found, (tokens, slot) in zip(together(made, sequences), sequences, strict=True):
        expected = trained_logits(base, None if slot < 0 else adapters[slot], tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize("name", ["llama3", pytest.param("gpt2", marks=MATRIX), pytest.param("mixtral", marks=MATRIX)])
def test_logits_are_those_of_peft(tmp_path: Path, name: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "llama3": {"target_modules": "all-linear", "modules_to_save": ["input_layernorm", "norm", "lm_head"]},
        "gpt2": {"target_modules": ["c_attn", "c_fc"], "bias": "all"},
        "mixtral": {"target_modules": ["q_proj", "o_proj"]},
    }
    base, adapter, logits = peft_adapters.make_with_peft(name, tmp_path, biases=True, **options[name])
    sequences = [(row, 0) for row in peft_adapters.tokens().tolist()]
    for found, expected in zip(together(serving(base, [adapter], JOB), sequences), logits.numpy(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        *(("llama3", 2), ("gpt2", 2), ("mixtral", 2)),
        *(pytest.param(each, 4, marks=MATRIX) for each in ("llama3", "mixtral")),
    ],
)
def test_bits_in_fp32_are_the_same_at_every_tp(tmp_path: Path, name: str, tp: int) -> None:
    base, adapters = make(tmp_path, name)
    expected = together(serving(base, adapters, JOB), prompts(VOCAB))
    found = over_ranks(base, adapters, replace(JOB, tp=tp), prompts(VOCAB), tmp_path / "store")
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "kv_dtype"),
    [
        ("bf16", "bf16", "int8"),
        *(
            pytest.param(*each, marks=MATRIX)
            for each in (
                ("fp32", "fp32", "fp32"),
                ("bf16", "int8", "bf16"),
                ("fp32", "int4", "int8"),
                ("fp16", "fp16", "fp16"),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "instruction_set",
    [*(pytest.param(each, marks=MATRIX) for each in instruction_sets()[:-1]), *instruction_sets()[-1:]],
)
def test_bits_depend_on_a_request_alone(
    tmp_path: Path, dtype: str, weight_dtype: str, kv_dtype: str, instruction_set: str
) -> None:
    job = replace(JOB, dtype=dtype, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    check_histories(tmp_path, replace(job, instruction_set=instruction_set))


@MATRIX
@pytest.mark.parametrize("instruction_set", MODELS)
def test_bits_depend_on_a_request_alone_with_models_of_instructions_for_bf16(
    tmp_path: Path, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "SOURCE", portable())
    monkeypatch.setattr(prepare, "instruction_sets", lambda: ("baseline", "wide", *MODELS))
    job = replace(JOB, dtype="bf16", weight_dtype="bf16", kv_dtype="bf16")
    check_histories(tmp_path, replace(job, instruction_set=instruction_set))


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [("bf16", "bf16"), *(pytest.param(*each, marks=MATRIX) for each in (("fp32", "fp32"), ("bf16", "int4")))],
)
def test_bits_beside_experts_depend_on_a_request_alone(tmp_path: Path, dtype: str, weight_dtype: str) -> None:
    check_histories(tmp_path, replace(JOB, dtype=dtype, weight_dtype=weight_dtype), "mixtral")


def check_histories(folder: Path, job: Job, name: str = "llama3") -> None:
    """Compares requests alone with requests beside those of other adapters and of none: in any cut of their prompts,
    after preemption, with proposals and on several threads.
    """
    base, adapters = make(folder, name)
    made, threaded = (serving(base, adapters, replace(job, threads=threads)) for threads in (1, 3))
    sequences, plain = prompts(VOCAB), serving(base, [], replace(job, adapter_slots=0))
    texts = [tokens for tokens, _ in sequences]
    leases = {i: AdapterLease(slot, f"{slot}") for i, (_, slot) in enumerate(sequences) if slot >= 0}
    every = range(len(texts))
    alone = [History(made, 100, 512, texts, 24, leases=leases).run([i]) for i in every]
    expected = History(plain, 100, 512, texts, 24).run([0, 1])
    assert all(map(torch.equal, expected.logits[1], alone[1].logits[1])), "a row without an adapter changed"
    assert not torch.equal(expected.logits[0][0], alone[0].logits[0][0])
    whole = [[*text, *history.tokens[i]] for i, (text, history) in enumerate(zip(texts, alone, strict=True))]
    for backend, num_blocks, budget in ((made, 100, 512), (threaded, 100, 23), (threaded, 8, 64)):
        proposer = partial(Oracle, whole, 4)
        found = History(backend, num_blocks, budget, texts, 24, 1, proposer, leases=leases).run(every)
        assert (found.preemptions > 0) == (num_blocks == 8)
        assert found.accepted > 0
        for i in every:
            assert torch.equal(torch.stack(found.logits[i]), torch.stack(alone[i].logits[i])), (i, num_blocks)


def test_rows_without_an_adapter_are_prepared_as_in_an_engine_without_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation before a product rounds them, and the area in which products round rows themselves is as empty."""
    monkeypatch.setattr(library, "SOURCE", portable())
    monkeypatch.setattr(prepare, "instruction_sets", lambda: MODELS)
    base, adapters = make(tmp_path)
    job = replace(JOB, dtype="bf16", weight_dtype="bf16", kv_dtype="bf16", instruction_set=MODELS[0])
    counts = []
    for places, slot in ((0, NO_ADAPTER), (3, NO_ADAPTER), (3, 0)):
        made = serving(base, adapters[:places], replace(job, adapter_slots=places))
        assert isinstance(made, NativeRunner)
        together(made, prompts(VOCAB, (9, 12), (slot, NO_ADAPTER)))
        area = (ctypes.c_uint16 * made._model.rounded_values).from_address(made._model.rounded)
        counts.append(np.count_nonzero(np.frombuffer(area, np.uint16)))
    assert counts[0] == counts[1] < counts[2]


def test_a_slot_serves_the_adapter_that_it_got_last(tmp_path: Path) -> None:
    base, adapters = make(tmp_path)
    sequences = prompts(VOCAB, (9,), (0,))
    [[first], [second]] = (together(serving(base, [each], JOB), sequences) for each in adapters)
    made = serving(base, adapters[:1], JOB)
    assert np.array_equal(together(made, sequences)[0], first)
    put(made, 0, make_adapter(tmp_path / "narrow", base, rank=2, targets=("o_proj",)), base, JOB)
    narrow = together(made, sequences)[0]
    put(made, 0, adapters[1], base, JOB)
    assert np.array_equal(together(made, sequences)[0], second)
    assert not np.array_equal(narrow, first)
