"""Adapters that the engine serves: log-probabilities of training, and requests of several that share steps."""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tk.core.errors import CheckpointError
from tk.infer import LLM, AsyncLLM, SamplingParams
from tk.infer.engine.request.completion import Completion
from tk.infer.engine.request.request import CacheOptions
from tk.tests.child_processes import child_ids
from tk.tests.infer.adapters import OWN, make_adapter, scores, trained_logits
from tk.tests.model.architectures import ENTRIES

MATRIX = pytest.mark.matrix
PROMPT = [7, 19, 200, 33, 7, 19, 200, 33, 7, 19, 5, 80] * 3  # repeats itself, so proposals come true
EXPERT_PROMPT = [7, 19, 20, 33, 5, 80]
SMALL: dict[str, Any] = {"kv_blocks": 12, "block_size": 16, "max_batched_tokens": 24, "max_running": 8, "speculate": 4}
SCORED = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def base(model_folder: Callable[[str], Path]) -> Path:
    """The folder of the base."""
    return model_folder("grouped")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of the base: one with norms and a head of its own, one of attention alone."""
    folder, attention = tmp_path_factory.mktemp("adapters"), ("q_proj", "v_proj", "o_proj")
    return {
        "a": make_adapter(folder / "a", base, seed=1, rank=3),
        "b": make_adapter(folder / "b", base, seed=2, rank=16, rslora=True, **OWN["llama3"]),
        "c": make_adapter(folder / "c", base, seed=3, rank=8, targets=attention),
    }


@pytest.fixture(scope="module")
def served(base: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    """An engine with the adapters "a" and "b" and room for others."""
    first = {name: adapters[name] for name in ("a", "b")}
    with LLM(base, adapters=first, max_adapters=4, kv_blocks=64, block_size=16) as llm:
        yield llm


def logprobs(completion: Completion) -> list[float]:
    """Returns the log-probabilities of a completion's tokens."""
    return [each.logprob for each in completion.choices[0].logprobs if each.logprob is not None]


def expected_logprobs(
    base: Path, adapter: Path | None, completion: Completion, prompt: list[int] = PROMPT
) -> list[float]:
    """Returns training's log-probabilities of a completion's tokens after a prompt."""
    new = completion.choices[0].token_ids
    tokens = [*prompt, *new]
    found: list[float] = scores(trained_logits(base, adapter, tokens), tokens)[-len(new) :].tolist()
    return found


@pytest.mark.parametrize(
    ("tp", "kernels"),
    [
        (1, "native"),
        *(pytest.param(*each, marks=MATRIX) for each in ((2, "native"), (4, "native"), (1, "aten"), (2, "aten"))),
    ],
)
def test_log_probabilities_are_those_of_training(base: Path, adapters: dict[str, Path], tp: int, kernels: str) -> None:
    with LLM(base, tp=tp, adapters=adapters, kernels=kernels, kv_blocks=64) as llm:
        for name, path in {"": None, **adapters}.items():
            [found] = llm.generate([PROMPT], SCORED, adapter=name)
            expected = expected_logprobs(base, path, found)
            np.testing.assert_allclose(logprobs(found), expected, atol=1e-5)
            score = llm.score(PROMPT, found.choices[0].token_ids, adapter=name)
            np.testing.assert_allclose(score.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("tp", "kernels"), [(1, "native"), *(pytest.param(*each, marks=MATRIX) for each in ((2, "native"), (2, "aten")))]
)
def test_adapters_of_experts_are_those_of_training(tmp_path: Path, tp: int, kernels: str) -> None:
    ENTRIES["mixtral"].make(tmp_path / "base")
    base, adapter = tmp_path / "base", make_adapter(tmp_path / "run", tmp_path / "base", rank=5)
    with LLM(base, tp=tp, adapters={"a": adapter}, kernels=kernels, kv_blocks=8) as llm:
        for name, path in (("", None), ("a", adapter)):
            [found] = llm.generate([EXPERT_PROMPT], SCORED, adapter=name)
            expected = expected_logprobs(base, path, found, EXPERT_PROMPT)
            np.testing.assert_allclose(logprobs(found), expected, atol=1e-5)


@MATRIX
@pytest.mark.parametrize("kernels", ["native", "aten"])
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_quantized_bases_cost_as_much_beside_adapters(
    base: Path, adapters: dict[str, Path], weight_dtype: str, kernels: str
) -> None:
    errors = {}
    with LLM(base, adapters=adapters, kernels=kernels, weight_dtype=weight_dtype, dtype="fp32", kv_blocks=64) as llm:
        for name, path in {"": None, **adapters}.items():
            [found] = llm.generate([PROMPT], replace(SCORED, max_new_tokens=24), adapter=name)
            difference = np.array(logprobs(found)) - expected_logprobs(base, path, found)
            errors[name] = np.sqrt((difference**2).mean())
    assert 0 < max(errors.values()) < 2 * errors[""]


def test_requests_of_different_adapters_share_steps(served: LLM) -> None:
    """Each has the log-probabilities that it has alone, with hits of the prefix cache, too."""
    names, params = ("a", "", "b", "a"), replace(SCORED, max_new_tokens=9)
    prompts = [PROMPT[i:] for i in range(len(names))]
    uncached = CacheOptions(bypass=True)
    alone = [served.generate([p], params, uncached, adapter=each)[0] for p, each in zip(prompts, names, strict=True)]
    assert len({each.choices[0].token_ids for each in alone}) > 1
    together = [asyncio.run(_at_once(served, prompts, names, params, use)) for use in (uncached, None, None)]
    for found in together:
        assert [logprobs(each) for each in found] == [logprobs(each) for each in alone]
    assert all(each.usage.cached_tokens for each in together[-1]), "the last ones were found in the cache"


async def _at_once(
    llm: LLM, prompts: list[list[int]], names: tuple[str, ...], params: SamplingParams, use: CacheOptions | None
) -> list[Completion]:
    threads = (
        asyncio.to_thread(llm.generate, [prompt], params, use, name)
        for prompt, name in zip(prompts, names, strict=True)
    )
    return [completion for [completion] in await asyncio.gather(*threads)]


@MATRIX
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bf16"},
        {"kernels": "aten"},
        {"kernels": "aten", "dtype": "bf16"},
        {"weight_dtype": "int8"},
        {"tp": 2},
    ],
)
def test_preemption_changes_no_answer(base: Path, adapters: dict[str, Path], options: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    prompts, names = [PROMPT[i:] for i in range(6)], ("a", "b", "", "c", "a", "b")
    with LLM(base, adapters=adapters, **SMALL, **options) as llm:
        alone = [llm.generate([each], params, adapter=name)[0] for each, name in zip(prompts, names, strict=True)]
        found = asyncio.run(_at_once(llm, prompts, names, params, None))
        assert llm.engine.statistics.totals().preemptions > 0
    assert [each.choices[0].token_ids for each in found] == [each.choices[0].token_ids for each in alone]


@MATRIX
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_dtype": "int8", "speculate": 4},
        {"dtype": "bf16", "speculate": 4},
        {"weight_dtype": "int4"},
        {"kernels": "aten", "kv_dtype": "int8"},
        {"tp": 2},
    ],
)
def test_32_requests_of_8_adapters_have_the_bits_that_each_has_alone(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    ranks = (4, 8, 16, 16, 24, 32, 48, 64)
    paths = {
        str(seed): make_adapter(tmp_path / str(seed), base, seed, rank=rank, **(OWN["llama3"] if seed % 2 else {}))
        for seed, rank in enumerate(ranks)
    }
    names = [("", *paths)[i % 9] for i in range(32)]
    prompts = [PROMPT[i % 5 : 20 + i] for i in range(32)]
    ways = (
        SamplingParams(max_new_tokens=40, temperature=0.0, logprobs=0, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=1.0, seed=5, logprobs=0, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=1.0, seed=6, logprobs=0, regex="[a-f]+"),
    )
    asked = [(prompt, ways[i % 3], names[i]) for i, prompt in enumerate(prompts)]

    async def check() -> None:
        room: dict[str, Any] = {"kv_blocks": 40, "block_size": 16, "max_running": 32, "max_batched_tokens": 96}
        async with AsyncLLM(base, adapters=paths, max_adapter_rank=64, **room, **options) as llm:
            uncached = CacheOptions(bypass=True)
            alone = [(await llm.generate([p], params, uncached, adapter=name))[0] for p, params, name in asked]
            streams = [llm.stream(p, ways[0], adapter=name) for p, _, name in asked[:4]]
            left = [await anext(stream) for stream in streams]
            together = [llm.generate([p], params, adapter=name) for p, params, name in asked]
            answers = asyncio.gather(*together)
            for stream in streams:
                await stream.aclose()  # aborts of requests beside the others
            found = [completion for [completion] in await answers]
            assert len(left) == 4
            assert llm.engine.statistics.totals().preemptions > 0
        for one, other in zip(alone, found, strict=True):
            assert one.choices[0].token_ids == other.choices[0].token_ids
            assert logprobs(one) == logprobs(other)

    asyncio.run(check())


def test_prefixes_are_those_of_an_adapters_bytes(base: Path, served: LLM, adapters: dict[str, Path]) -> None:
    prompt, params = [*range(40, 90)], SamplingParams(max_new_tokens=1)

    def num_cached(name: str) -> int:
        return served.generate([prompt], params, adapter=name)[0].usage.cached_tokens

    assert [num_cached(name) for name in ("a", "a", "b", "", "b")] == [0, 48, 0, 0, 48]
    served.load_adapter("same", adapters["a"])
    assert num_cached("same") == 48, "the bytes of a, under another name"
    served.load_adapter("same", adapters["c"])
    assert num_cached("same") == 0
    served.unload_adapter("same")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_folder_of_peft_may_have_the_tokenizer_of_its_base_and_no_other(
    base: Path, served: LLM, tmp_path: Path
) -> None:
    """As `save_pretrained` of transformers writes it beside the adapter's files."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(tmp_path)
    served.load_adapter("theirs", tmp_path)
    assert served.engine.adapters.loaded["theirs"].rank == 2
    served.unload_adapter("theirs")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has a chat template of its own"):
        served.load_adapter("theirs", tmp_path)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer.json has another vocabulary than .*: \('<tool>', 264\)"):
        served.load_adapter("theirs", tmp_path)
    assert "theirs" not in served.engine.adapters.loaded


def held() -> tuple[int, int]:
    """Returns the resident bytes of this process and its children, and the number of their open files."""
    processes = [os.getpid(), *child_ids()]
    pages = (int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in processes)
    return sum(pages) * os.sysconf("SC_PAGE_SIZE"), sum(len(os.listdir(f"/proc/{each}/fd")) for each in processes)


@MATRIX
def test_a_thousand_loads_leave_nothing_behind(base: Path, tmp_path: Path) -> None:
    paths = [make_adapter(tmp_path / str(seed), base, seed=seed, rank=64, **OWN["llama3"]) for seed in range(2)]
    with LLM(base, max_adapters=2, max_adapter_heads=2, kv_blocks=64) as llm:
        seen = []
        for number in range(1, 1001):
            llm.load_adapter("a", paths[number % 2])
            llm.generate([PROMPT], SamplingParams(max_new_tokens=1), adapter="a")
            llm.unload_adapter("a")
            if number in (200, 1000):
                gc.collect()
                seen.append(held())
        (first_bytes, first_files), (last_bytes, last_files) = seen
        assert last_files == first_files
        assert last_bytes - first_bytes < 4 * 2**20
