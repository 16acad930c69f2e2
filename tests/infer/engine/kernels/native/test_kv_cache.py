"""The cache takes the memory that the plan counts."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kv_formats import KV_DTYPES
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.memory_plan import plan_memory
from tk.model.stored_config import stored_config
from tk.tests.infer.engine.kernels.native.running import NUM_BLOCKS, runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.model.architectures import ENTRIES


@pytest.mark.skipif(not instruction_sets(), reason="no compiler")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["llama3", "qwen3"])  # heads of 8 and of 24
def test_the_cache_takes_what_the_plan_counts(tmp_path: Path, name: str, kv_dtype: str) -> None:
    ENTRIES[name].make(tmp_path)
    options = EngineOptions(tmp_path, kernels="native", block_size=BLOCK_SIZE, kv_blocks=NUM_BLOCKS)
    plan = plan_memory(stored_config(Checkpoint.open(tmp_path)), options, "fp32", kv_dtype)
    made = runner(tmp_path, "fp32", kv_dtype, num_twins=plan.num_twins)
    assert (0 < plan.num_twins < NUM_BLOCKS) == (kv_dtype in ("int4", "k8v4"))
    assert made.kv_bytes == plan.kv_bytes
    made.close()
