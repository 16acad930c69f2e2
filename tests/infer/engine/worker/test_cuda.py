"""Serving on a GPU: the same greedy tokens as on the CPU, in fp32, and a cache that does not fit is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tk.core.errors import ConfigError
from tk.infer import LLM, SamplingParams
from tk.infer.engine.job import Job
from tk.infer.engine.worker.worker import load
from tk.tests.infer.engine.kernels.triton.run.test_model_runner import decoding, prompts
from tk.tests.infer.sampling_row import SamplingRow

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


@pytest.mark.parametrize(("kv_dtype", "weight_dtype"), [("fp32", "auto"), ("int8", "int8"), ("k8v4", "int4")])
def test_triton_and_aten_generate_alike(model_folder: Callable[[str], Path], kv_dtype: str, weight_dtype: str) -> None:
    """Greedy and sampled, of which one row is the host's; of all lengths at once, then one alone."""
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "weight_dtype": weight_dtype, "kv_blocks": 30, "max_running": 4}
    sampled = [SamplingParams(temperature=0.9, seed=i, max_new_tokens=24, ignore_eos=True) for i in range(2)]
    filtered = SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_new_tokens=24, ignore_eos=True)
    found = []
    for kernels in ("triton", "aten"):
        with LLM(model_folder("grouped"), kernels=kernels, **options) as llm:
            assert llm.model_info().kernels == kernels
            answers = [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS[:1], GREEDY)]
            answers += llm.generate(PROMPTS, [*sampled, filtered])
            found.append([each.token_ids for each in answers])
    assert found[0] == found[1]


def test_auto_takes_triton_on_a_gpu(model_folder: Callable[[str], Path]) -> None:
    with LLM(model_folder("grouped"), kv_blocks=30) as llm:
        assert llm.model_info().kernels == "triton"


def test_graphs_have_the_logits_of_launches(model_folder: Callable[[str], Path]) -> None:
    """The same steps one by one, by graphs and, with more rows than the largest bucket has, without."""
    found = []
    for max_running in (4, 1):
        job = Job(
            str(model_folder("grouped")),
            "triton",
            "fp32",
            "fp32",
            8,
            0,
            16,
            64,
            on_gpus=True,
            max_running=max_running,
        )
        runner = load(job)
        runner.step(prompts())
        found.append(runner.logits(decoding([SamplingRow(row) for row in range(3)])))
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
