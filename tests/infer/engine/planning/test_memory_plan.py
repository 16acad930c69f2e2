"""The memory of a rank: bytes counted by hand, the number of blocks that fit, and refusals before any process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.infer import LLM
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning import memory_plan, placement
from tk.infer.engine.planning.memory_plan import plan_memory
from tk.infer.engine.planning.model_bytes import kv_bytes_per_rank, weight_bytes_per_rank
from tk.model.config import ModelConfig
from tk.tests.model.tiny_llama import TINY_LLAMA

CONFIG = ModelConfig(**TINY_LLAMA, max_position_embeddings=640)


def test_weights_are_those_of_the_rank_with_most() -> None:
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32  # q and o, k and v, feed-forward
    norms = 2 * 32
    assert weight_bytes_per_rank(CONFIG, 1, "fp32") == 4 * (2 * 101 * 32 + 2 * (layer + norms) + 32)
    assert weight_bytes_per_rank(CONFIG, 2, "bf16") == 2 * (2 * 51 * 32 + 2 * (layer // 2 + norms) + 32)


@pytest.mark.parametrize(
    ("tp", "kv_dtype", "size"),
    [
        (1, "fp32", 2 * 2 * 2 * 8 * 4),
        (2, "bf16", 2 * 2 * 1 * 8 * 2),
        (4, "fp32", 2 * 2 * 1 * 8 * 4),  # two ranks hold each kv head
        (1, "fp8", 2 * 2 * 2 * 8),
        (1, "int4", 2 * 2 * 2 * (4 + 4)),  # fp16 scale and zero
        (1, "k8v4", 2 * 2 * (8 + 4 + 4 + 4)),
        (1, "int8", 2 * 2 * 2 * (8 + 4)),  # each vector has an fp32 scale
    ],
)
def test_a_token_takes_keys_and_values_of_every_layer(tp: int, kv_dtype: str, size: int) -> None:
    assert kv_bytes_per_rank(CONFIG, tp, kv_dtype) == size


def test_kv_memory_holds_one_block_more_than_requests_can_use() -> None:
    block = 16 * kv_bytes_per_rank(CONFIG, 1, "fp32")
    options = EngineOptions(Path("m"), block_size=16, kv_memory=11 * block - 1, kernels="aten")
    plan = plan_memory(CONFIG, options, "fp32", "fp32")
    assert (plan.block.block, plan.num_blocks, plan.kv_bytes) == (block, 9, 10 * block)
    assert plan.max_model_len == 9 * 16, "the cache is shorter than the model"
    with pytest.raises(ConfigError, match="too little: two blocks of 16 tokens"):
        plan_memory(CONFIG, replace(options, kv_memory=2 * block - 1), "fp32", "fp32")


def test_yarn_extends_the_longest_sequence() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = ModelConfig(**TINY_LLAMA | {"rope_scaling": yarn, "max_position_embeddings": 640})
    options = EngineOptions(Path("m"), block_size=16, kv_blocks=200, kernels="aten")
    assert plan_memory(config, options, "fp32", "fp32").max_model_len == 4 * 512
    assert plan_memory(config, replace(options, max_model_len=700), "fp32", "fp32").max_model_len == 700
    with pytest.raises(ConfigError, match=r"2049 is more than .*embeddings = 640, which YaRN extends to 2048\. "):
        plan_memory(config, replace(options, max_model_len=2049), "fp32", "fp32")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_has_the_blocks_of_the_model_and_its_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda: 1 << 24)
    small = ModelConfig(**TINY_LLAMA | {"num_hidden_layers": 1})
    options = EngineOptions(Path("m"), tp=tp, block_size=16, max_running=4000, max_batched_tokens=4000, kernels="aten")
    draft = plan_memory(small, replace(options, tp=1, kv_blocks=1), "fp32", "fp32")
    alone, plan = (plan_memory(CONFIG, options, "bf16", "bf16", each) for each in (None, draft))
    assert plan.draft is not None
    assert plan.draft.num_blocks == plan.num_blocks < alone.num_blocks
    share = -(-plan.draft.total_bytes // tp)
    assert plan.total_bytes == alone.total_bytes - alone.kv_bytes + plan.kv_bytes + share
    fixed = plan.draft.weight_bytes + plan.draft.buffer_bytes
    room = (1 << 24) // tp - plan.weight_bytes - plan.buffer_bytes - fixed // tp
    cached = plan.kv_bytes + plan.draft.kv_bytes / tp
    assert 0.99 * memory_plan.KV_SHARE * room < cached <= memory_plan.KV_SHARE * room + plan.block.block
    assert "draft     fp32" in plan.table()
    assert "of weights, " in plan.table()
    assert "draft" not in alone.table()
    monkeypatch.setattr(memory_plan, "free_memory", lambda: plan.total_bytes * tp - 1)
    with pytest.raises(ConfigError, match="draft"):
        plan_memory(CONFIG, replace(options, kv_blocks=plan.num_blocks), "bf16", "bf16", draft)


def test_blocks_of_4_bits_share_twins() -> None:
    """16 running sequences and a step of 64 tokens: 4 twins each, and one for each block of the step."""
    block, twin = 16 * 2 * 2 * 2 * (4 + 4), 16 * 2 * 2 * 2 * (8 + 4)
    options = EngineOptions(
        Path("m"),
        block_size=16,
        max_running=16,
        max_batched_tokens=64,
        kernels="aten",
        kv_memory=101 * block + 69 * twin,
    )
    plan = plan_memory(CONFIG, options, "fp32", "int4")
    assert (plan.block.block, plan.block.twin, plan.num_blocks, plan.num_twins) == (block, twin, 100, 68)
    assert plan.kv_bytes == options.kv_memory
    few = plan_memory(CONFIG, replace(options, kv_memory=11 * (block + twin)), "fp32", "int4")
    assert (few.num_blocks, few.num_twins, few.kv_bytes) == (10, 0, 11 * (block + twin)), "each has its own"
    k8v4 = plan_memory(CONFIG, options, "fp32", "k8v4")
    assert (k8v4.block.twin, k8v4.num_twins) == (twin // 2, 68), "of values only"
    assert plan_memory(CONFIG, options, "fp32", "int8").num_twins == 0


@pytest.mark.parametrize(("kv_dtype", "vector_bytes"), [("fp32", 16 * 4), ("bf16", 16 * 2), ("int8", 16 + 4)])
def test_native_kernels_pad_heads(monkeypatch: pytest.MonkeyPatch, kv_dtype: str, vector_bytes: int) -> None:
    """A model with heads of 8 where a GPU is or is not: the ATen backend stores them as they are."""
    for gpus, kernels, padded in (
        (0, "auto", True),
        (1, "native", True),
        (1, "auto", True),
        (1, "aten", False),
        (0, "aten", False),
    ):
        monkeypatch.setattr(placement, "count_gpus", partial(int, gpus))
        monkeypatch.setattr(memory_plan, "free_gpu_memory", lambda num_gpus: [1 << 30])
        options = EngineOptions(Path("m"), block_size=16, kv_blocks=4, kernels=kernels)
        plan = plan_memory(CONFIG, options, "fp32", kv_dtype)
        token = 2 * 2 * 2 * vector_bytes if padded else kv_bytes_per_rank(CONFIG, 1, kv_dtype)
        assert (plan.kv_bytes_per_token, plan.kv_bytes) == (token, 5 * 16 * token)


def test_without_limits_the_cache_holds_as_much_as_all_running_requests_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = EngineOptions(
        Path("m"), block_size=32, max_running=3, max_model_len=100, max_batched_tokens=3, threads=1, kernels="aten"
    )
    monkeypatch.setattr(memory_plan, "free_memory", lambda: 1 << 30)
    plan = plan_memory(CONFIG, options, "fp32", "fp32")
    assert plan.num_blocks == 3 * 4
    few = plan.weight_bytes + plan.buffer_bytes + 300_000
    monkeypatch.setattr(memory_plan, "free_memory", lambda: few)
    block = 32 * kv_bytes_per_rank(CONFIG, 1, "fp32")
    assert plan_memory(CONFIG, options, "fp32", "fp32").num_blocks == 90_000 // block - 1, "30 % of the free memory"


@pytest.mark.parametrize("options", [{"kv_memory": 100 << 40}, {"kv_blocks": 1 << 40}])
def test_more_memory_than_the_host_has_is_refused(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    monkeypatch.setattr(placement, "count_gpus", lambda: 0)
    chosen = EngineOptions(model_folder("grouped"), tp=2, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"of a rank take .*iB, and this machine, for each of 2 ranks, has .* free"):
        Engine.start(chosen)


def test_the_memory_of_gpus_counts_where_ranks_compute_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 200 and 110 kB in a machine without memory of its own."""
    monkeypatch.setattr(placement, "count_gpus", lambda: 2)
    monkeypatch.setattr(memory_plan, "free_gpu_memory", lambda num_gpus: (200_000, 110_000)[:num_gpus])
    monkeypatch.setattr(memory_plan, "free_memory", lambda: 0)
    block = 32 * kv_bytes_per_rank(CONFIG, 1, "fp32")
    for tp, smallest in ((1, 200_000), (2, 110_000)):
        options = EngineOptions(Path("m"), tp=tp, max_running=1, max_batched_tokens=1, threads=1, kernels="aten")
        plan = plan_memory(CONFIG, options, "fp32", "fp32")
        room = smallest - plan.weight_bytes - plan.buffer_bytes
        assert plan.num_blocks == int(0.9 * room) // (block // tp) - 1
    with pytest.raises(ConfigError, match=r"each GPU has .* free"):
        plan_memory(CONFIG, EngineOptions(Path("m"), kv_memory=400_000, kernels="aten"), "fp32", "fp32")
    for on_host in (EngineOptions(Path("m"), tp=4), EngineOptions(Path("m"), kernels="native")):
        with pytest.raises(ConfigError, match="too little"):
            plan_memory(CONFIG, on_host, "fp32", "fp32")


def test_memory_is_as_planned(llm: LLM, llm_tp2: LLM) -> None:
    whole, half = llm.engine.source.memory, llm_tp2.engine.source.memory
    assert half.weight_bytes < 0.6 * whole.weight_bytes
    assert whole.kv_bytes == 41 * whole.block.block
    assert whole.block.block == 2 * 2 * 4 * 16 * 4 * 16, "heads of 8, padded to 16"
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token == 2 * 2 * 4 * 16 * 4
    assert "40 blocks of 16 tokens" in whole.table()
    assert llm.engine.info.max_model_len == 640
