"""Serving on a GPU: the same greedy tokens as on the CPU, in fp32, and a cache that does not fit is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

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


def test_cuda_and_transformers_generate_alike(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("grouped")
    with LLM(folder, kernels="aten", kv_blocks=30) as llm:
        ours = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    model = LlamaForCausalLM.from_pretrained(folder).cuda()
    model.generation_config.eos_token_id = None  # as `ignore_eos`: the end is a token like others
    for prompt, mine in zip(PROMPTS, ours, strict=True):
        given = torch.tensor([prompt], device="cuda")
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        theirs = model.generate(given, attention_mask=torch.ones_like(given), **options)
        assert theirs[0, len(prompt) :].tolist() == list(mine)


def test_cuda_and_cpu_sample_alike(model_folder: Callable[[str], Path]) -> None:
    """The same seeds draw the same tokens: noise depends on seed and position, and logits differ by rounding alone."""
    drawn = []
    sampling = [SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_new_tokens=24) for seed in range(3)]
    for kernels in ("aten", "native"):
        with LLM(model_folder("grouped"), kernels=kernels, kv_blocks=30) as llm:
            drawn.append([completion.token_ids for completion in llm.generate(PROMPTS, sampling)])
    assert drawn[0] == drawn[1]


def test_a_cache_that_does_not_fit_is_refused(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="Lower kv_memory or kv_blocks"):
        LLM(model_folder("grouped"), kernels="aten", kv_memory=1 << 42)
