"""The backend on a GPU, as far as a machine without one can tell.

No operation has tensors of two devices, and the steps give the bits of the CPU where both compute alike: a CPU without
kernels for 16 bits rounds products that it computed in fp32 (see parallel/products.py), so the tests tell it to have
them.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.shared_read import ALONE as NO_PEERS
from tk.core.casts import Array
from tk.core.dtypes import by_name
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.aten import prepare
from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.aten.model_runner import ModelRunner
from tk.infer.engine.kernels.aten.prepared_weights import PreparedWeights
from tk.infer.engine.kernels.loading import load_weights
from tk.infer.engine.kv_formats import KV_DTYPES
from tk.infer.engine.program.lower import lower, serving_slices
from tk.infer.engine.program.quantization import groupings
from tk.infer.engine.program.weights import load_params
from tk.infer.engine.step.running_plan import RunningPlan
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.parallel import products
from tk.parallel.mesh import ALONE, Group
from tk.tests.infer.adapters import OWN, make_adapter
from tk.tests.infer.engine.kernels.adapted import JOB, prompts, serving, together
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES, VOCAB
from tk.tests.pretend_gpu import GPU, pretend_gpu

BLOCK, NUM_BLOCKS = 16, 8
# of a step: its numbers, packed, and its logits
COPIES = [
    "infer/engine/kernels/step_tensors.py send: to the GPU",
    "infer/engine/kernels/step_tensors.py on_host: to the host",
]
WAITS = ["infer/engine/kernels/step_tensors.py on_host: synchronizes the stream"]
WEIGHTS = ("auto", "int8", "int4")
DTYPES = ("fp32", "bf16", "fp16")
# For `make test`: positions, LayerNorm and biases; rotation, norms of heads, experts, codes of weights, twins in int8.
CHOICE = {("gpt2", "bf16", "int8", "auto"), ("qwen3_moe", "fp32", "k8v4", "int4")}


def steps() -> list[RunningPlan]:
    """Returns three steps: two prompts; one token after each, with two proposals behind one of them, and a copy of a
    block; and the end of a long prompt that was cut, beside one more token."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 64, dtype=np.int32)

    def plan(
        spans: list[tuple[int, int, list[int]]],
        rows: list[SamplingRow],
        twins: list[tuple[int, int]],
        forks: list[tuple[int, int]],
    ) -> RunningPlan:
        positions = [np.arange(first, first + count, dtype=np.int32) for first, count, _ in spans]
        blocks = [np.array(table, np.int32) for *_, table in spans]
        slots = [table[at // BLOCK] * BLOCK + at % BLOCK for at, table in zip(positions, blocks, strict=True)]
        widest = max(map(len, blocks))
        return RunningPlan(
            tokens=tokens[: sum(count for _, count, _ in spans)],
            positions=np.concatenate(positions),
            slots=np.concatenate(slots).astype(np.int32),
            span_length=np.array([count for _, count, _ in spans], np.int32),
            block_tables=np.stack([np.pad(table, (0, widest - len(table))) for table in blocks]),
            rows=pack(rows),
            twins=np.array(twins, np.int32).reshape(-1, 2),
            forks=np.array(forks, np.int32).reshape(-1, 2),
        )

    return [
        plan(
            [(0, 20, [1, 2]), (0, 5, [3])],
            [SamplingRow(19, num_top=5), SamplingRow(24, num_top=5, temperature=0.7)],
            TWINS[:3],
            [],
        ),
        plan([(20, 3, [1, 2]), (5, 1, [4])], [SamplingRow(row, num_top=5) for row in range(4)], TWINS[3:], [(3, 4)]),
        plan([(23, 1, [1, 2]), (6, 30, [4, 5, 6])], [SamplingRow(0, num_top=5), SamplingRow(30, num_top=5)], [], []),
    ]


TWINS = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)]  # of blocks whose values have 4 bits


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_WITHOUT_KERNELS", frozenset())


def exchange_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a rank of two what each exchange would if the other one had the same values, without that one."""

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: object) -> None:
        for part in parts:
            part.copy_(tensor)

    def all_reduce(tensor: torch.Tensor, group: object, async_op: bool) -> None:
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)


def traffic_of_steps(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """Returns a list to which each step adds its copies between the GPU and the host, and its waits for the GPU."""
    found, step = list[tuple[list[str], list[str]]](), ModelRunner.step

    def noted(runner: ModelRunner, plan: RunningPlan) -> Any:
        copies, waits = len(gpu.copies), len(gpu.waits)
        output = step(runner, plan)
        found.append((gpu.copies[copies:], gpu.waits[waits:]))
        return output

    monkeypatch.setattr(ModelRunner, "step", noted)
    return found


def computed(
    folder: Path, dtype: str, kv_dtype: str, weight_dtype: str, device: torch.device, tp: Group = ALONE
) -> list[Array]:
    """Returns the tokens of all steps, and the best ones of each row with their log-probabilities; [] if not rank 0."""
    checkpoint = Checkpoint.open(folder)
    spec = decoder_spec(stored_config(checkpoint))
    program = lower(spec, tp.size, tp.rank, serving_slices(spec, tp.size, dtype))
    weights = PreparedWeights(program, by_name(dtype), weight_dtype, device)
    job = Job(str(folder), "aten", dtype, kv_dtype, NUM_BLOCKS, 0, BLOCK, 64, weight_dtype=weight_dtype)

    load = partial(
        load_params,
        program.params,
        spec.table,
        checkpoint,
        by_name(dtype),
        wide={*groupings(program, weight_dtype), *program.wide},
    )
    weights.keep_key_factors(load_weights(job, program, load, weights.take, NO_PEERS, 1))
    cache = KVCache(program.num_layers, NUM_BLOCKS, program.num_kv_heads, BLOCK, program.head_dim, kv_dtype, 7, device)
    runner = ModelRunner(program, weights, cache, tp, 32)
    found: list[Array] = []
    for plan in steps():
        output = runner.step(plan)
        assert (output is not None) == (tp.rank == 0)
        found += [] if output is None else [output.token_ids, output.top_ids, output.top_logprobs]
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype", "weight_dtype"),
    [
        pytest.param(*each, marks=() if each in CHOICE else pytest.mark.matrix)
        for each in (
            (name, dtype, kv_dtype, weight_dtype)
            for name in ENTRIES
            for dtype in DTYPES
            for kv_dtype in KV_DTYPES
            for weight_dtype in WEIGHTS
            if sum((dtype != "fp32", kv_dtype != "int4", weight_dtype != "auto")) <= 1
            or (name, dtype, kv_dtype, weight_dtype) in CHOICE
        )
    ],
)
def test_every_operation_of_a_step_has_tensors_of_one_device(
    name: str, dtype: str, kv_dtype: str, weight_dtype: str, tmp_path: Path
) -> None:
    ENTRIES[name].make(tmp_path)
    expected = computed(tmp_path, dtype, kv_dtype, weight_dtype, torch.device("cpu"))
    with torch.inference_mode(), pretend_gpu() as gpu:
        found = computed(tmp_path, dtype, kv_dtype, weight_dtype, GPU)
    assert gpu.num_operations > 1000
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param(name, rank, marks=() if (name, rank) == ("qwen3_moe", 0) else pytest.mark.matrix)
        for name in ENTRIES
        for rank in (0, 1)
    ],
)
def test_every_operation_of_a_tensor_parallel_rank_has_tensors_of_one_device(
    name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_with_itself(monkeypatch)
    ENTRIES[name].make(tmp_path)
    tp = Group(None, rank, 2)
    expected = computed(tmp_path, "bf16", "int8", "auto", torch.device("cpu"), tp)
    with torch.inference_mode(), pretend_gpu() as gpu:
        found = computed(tmp_path, "bf16", "int8", "auto", GPU, tp)
    assert gpu.num_operations > 1000
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kv_dtype", ["int4", *(pytest.param(each, marks=pytest.mark.matrix) for each in KV_DTYPES)])
@pytest.mark.parametrize(
    "name",
    [*("llama3", "mixtral"), *(pytest.param(each, marks=pytest.mark.matrix) for each in ("qwen2_moe", "glm4_moe"))],
)
def test_a_step_makes_one_copy_there_and_waits_for_one_back(
    name: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ENTRIES[name].make(tmp_path)
    with torch.inference_mode(), pretend_gpu() as gpu, monkeypatch.context() as patch:
        traffic = traffic_of_steps(gpu, patch)
        computed(tmp_path, "bf16", kv_dtype, "auto", GPU)
    assert traffic == [(COPIES, WAITS)] * 3


def test_a_rank_that_does_not_sample_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange_with_itself(monkeypatch)
    ENTRIES["mixtral"].make(tmp_path)
    with torch.inference_mode(), pretend_gpu() as gpu, monkeypatch.context() as patch:
        traffic = traffic_of_steps(gpu, patch)
        computed(tmp_path, "bf16", "int8", "auto", GPU, Group(None, 1, 2))
    assert traffic == [(COPIES[:1], [])] * 3


@pytest.mark.parametrize(
    ("name", "weight_dtype"),
    [
        *(("mixtral", "bf16"), ("qwen2_moe", "int4")),
        *(pytest.param(each, "bf16", marks=pytest.mark.matrix) for each in ("llama3", "gpt2", "gpt2 untied", "qwen3")),
        pytest.param("llama3", "int8", marks=pytest.mark.matrix),
    ],
)
def test_adapters_mix_no_devices_and_wait_for_nothing(
    name: str, weight_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker loads base and adapters, and computes prompts of which some have one, in steps of several."""
    base = tmp_path / "base"
    ENTRIES[name].make(base)
    adapters = [
        make_adapter(tmp_path / str(rank), base, seed=rank, rank=rank, rslora=True, **more)
        for rank, more in ((3, {}), (16, OWN[name]))
    ]
    job, sequences = replace(JOB, kernels="aten", dtype="bf16", weight_dtype=weight_dtype), prompts(VOCAB)
    expected = together(serving(base, adapters, job), sequences, steps=2)
    with torch.inference_mode(), pretend_gpu() as gpu, monkeypatch.context() as patch:
        patch.setattr(prepare, "_device", lambda job: GPU)
        made = serving(base, adapters, job)
        before = len(gpu.waits)
        found = together(made, sequences, steps=2)
        assert gpu.waits[before:] == WAITS * 2
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
