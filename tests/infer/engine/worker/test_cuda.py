"""Serving on a GPU: the same greedy tokens as on the CPU, in fp32, and a cache that does not fit is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.infer import LLM, SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(1, 101)), [9]]


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_cuda_and_cpu_generate_alike(model_folder: Callable[[str], Path], kv_dtype: str) -> None:
    with LLM(model_folder("grouped"), kernels="aten", kv_dtype=kv_dtype, kv_blocks=30) as llm:
        on_gpu = llm.generate(PROMPTS, GREEDY)
    with LLM(model_folder("grouped"), kernels="native", kv_dtype=kv_dtype, kv_blocks=30) as llm:
        on_cpu = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in on_gpu] == [c.token_ids for c in on_cpu]


def test_a_cache_that_does_not_fit_is_refused(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="Lower kv_memory or kv_blocks"):
        LLM(model_folder("grouped"), kernels="aten", kv_memory=1 << 42)
