"""Whole steps on Triton's kernels in its interpreter, against ATen's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tk.infer.engine.job import Job
from tk.infer.engine.kernels.batch_check import ProbedSequence, why_not_invariant
from tk.infer.engine.kernels.triton.launches import FixedKernels, TritonKernels
from tk.infer.engine.kernels.triton.self_check import MOST
from tk.tests.infer.adapters import make_adapter
from tk.tests.infer.engine.kernels.aten.test_devices import WAITS, steps
from tk.tests.infer.engine.kernels.triton.pretended_launches import pretended_launches
from tk.tests.infer.engine.kernels.triton.run.test_device_adapters import BOTH, serving, with_adapters
from tk.tests.infer.engine.kernels.triton.run.test_model_runner import ROWS, decoded, decoding, prompts
from tk.tests.infer.engine.kernels.triton.runners import runners
from tk.tests.infer.engine.kernels.triton.where import DEVICE, IS_PRETENDED, ON_GPU
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES, VOCAB
from tk.tests.pretend_gpu import GPU

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]
WAIT = "infer/engine/kernels/triton/step/result_copies.py wait: synchronizes the stream"


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype", "weight_dtype"),
    [
        ("llama3", "fp32", "fp32", "auto"),
        ("qwen3_moe", "fp32", "k8v4", "int4"),
        ("gpt2", "fp32", "int8", "int8"),
        ("glm4_moe", "fp32", "fp32", "auto"),
        ("qwen2 sliding", "fp16", "fp8", "auto"),
        pytest.param("mixtral", "bf16", "bf16", "auto", marks=pytest.mark.skipif(not ON_GPU, reason="a GPU has bf16")),
    ],
)
def test_steps_have_the_tokens_of_aten(name: str, dtype: str, kv_dtype: str, weight_dtype: str, tmp_path: Path) -> None:
    ENTRIES[name].make(tmp_path)
    ours, theirs, _ = runners(
        tmp_path, dtype, kv_dtype, weight_dtype, make_kernels=TritonKernels, device=DEVICE, max_running=4
    )
    # In 16 bits logits differ as they may at start: then the next tokens may, too, and all that follows.
    count = 3 if dtype == "fp32" else 0
    (found, logits_RV), (expected, expected_RV) = decoded(ours, ROWS, count), decoded(theirs, ROWS, count)
    np.testing.assert_array_equal(found, expected)
    assert np.linalg.norm(logits_RV - expected_RV) <= MOST[dtype] * np.linalg.norm(expected_RV)
    mixed = steps()[0]
    logits_RV, expected_RV = ours.logits(mixed), theirs.logits(mixed)
    assert np.linalg.norm(logits_RV - expected_RV) <= MOST[dtype] * np.linalg.norm(expected_RV)


@pytest.mark.skipif(ON_GPU or IS_PRETENDED, reason="all tests run on a GPU, or a pretended one")
def test_a_step_on_a_pretended_gpu_launches_no_tensor_of_the_host_and_waits_once(tmp_path: Path) -> None:
    """TK_PRETEND_GPU=1 runs all other tests of kernels there."""
    ENTRIES["gpt2"].make(tmp_path)
    with pretended_launches() as gpu:
        ours, theirs, graphs = runners(
            tmp_path, "fp32", "int8", "int8", make_kernels=TritonKernels, device=GPU, max_running=4
        )
        for backend in (ours, theirs):
            backend.step(prompts())
        before = len(gpu.waits)
        found, expected = ours.step(decoding(ROWS)), theirs.step(decoding(ROWS))
        assert gpu.waits[before:] == [WAIT, *WAITS]
        assert graphs.num_replays == 1
    assert expected is not None
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)


def test_steps_with_adapters_have_the_tokens_of_aten(tmp_path: Path) -> None:
    """Factors, and norms of an adapter's own, of hidden and of heads."""
    base = tmp_path / "base"
    ENTRIES["qwen3"].make(base)
    own = {3: (), 20: ("q_norm", "k_norm", "norm", "input_layernorm")}
    adapters = [make_adapter(tmp_path / f"{r}", base, seed=r, rank=r, modules_to_save=each) for r, each in own.items()]
    ours, theirs, _ = serving(base, adapters, "fp32", make_kernels=TritonKernels, device=DEVICE, max_running=1)
    plan = replace(with_adapters(prompts(), BOTH), rows=pack([SamplingRow(row) for row in (2, 13, 18, 21)]))
    np.testing.assert_allclose(ours.logits(plan), theirs.logits(plan), atol=1e-3)


def test_rows_with_adapters_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """A row without one has those that it has in a step without adapters; as a prompt, cut and in a graph."""
    base = tmp_path / "base"
    ENTRIES["qwen3"].make(base)
    adapters = [make_adapter(tmp_path / f"{r}", base, seed=r, rank=r) for r in (3, 20)]
    ours, theirs, graphs = serving(
        base, adapters, make_kernels=FixedKernels, is_fixed=True, device=DEVICE, max_running=1, max_batched_tokens=4
    )
    job = Job(str(base), "triton", "fp32", "fp32", 8, 0, 16, max_batched_tokens=4)
    assert why_not_invariant(ours.logits, job, VOCAB, slot=1) == ""
    assert graphs.num_replays == 1
    rows = pack([SamplingRow(row) for row in (2, 13, 18, 21)])
    mixed, plain = (replace(with_adapters(prompts(), each), rows=rows) for each in (BOTH, ()))
    logits_RV = ours.logits(mixed)
    np.testing.assert_allclose(logits_RV, theirs.logits(mixed), atol=1e-3)
    np.testing.assert_array_equal(logits_RV[2].view(np.uint32), ours.logits(plain)[2].view(np.uint32))


def test_rows_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """Products in floats and in codes, of experts, of a router and of the gate of a shared expert."""
    ENTRIES["qwen2_moe"].make(tmp_path)
    ours, theirs, graphs = runners(
        tmp_path,
        weight_dtype="int4",
        make_kernels=FixedKernels,
        is_fixed=True,
        device=DEVICE,
        max_running=1,
        max_batched_tokens=3,
    )
    job = Job(str(tmp_path), "triton", "fp32", "fp32", 8, 0, 16, max_batched_tokens=3)
    assert why_not_invariant(ours.logits, job, VOCAB) == ""
    assert graphs.num_replays == 1, "one token alone is a graph, two are not"
    plan = ProbedSequence(3, 16, VOCAB).step([range(3)])
    np.testing.assert_allclose(ours.logits(plan), theirs.logits(plan), atol=1e-3)
