"""Random engine options on which no answer depends, random requests: each has the bits of one served alone."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tk.infer import LLM, SamplingParams
from tk.infer.engine.request.completion import Completion
from tk.tests.infer.adapters import OWN, make_adapter
from tk.tests.infer.conftest import VOCAB
from tk.tests.infer.drafts import always_draft, draft_of
from tk.tests.infer.random_requests import random_params, random_prompts, said
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.architectures import VOCAB as VOCAB_OF_ENTRIES

Request = tuple[list[int], SamplingParams, str]  # with the name of an adapter
WITH_TEXTS = ("grouped", "tied", "grouped") * 3  # models with a tokenizer are about half of all
LONGEST = 640  # tokens of a sequence
FEW = 15  # a seed with native kernels, adapters, a draft, packed weights, samples and constraints: some seconds
LEFT_EARLY = SamplingParams(max_new_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Path]]:
    """The folders of a model, a draft, two adapters, and one for packed weights, by the model's name."""
    made: dict[str, dict[str, Path]] = {}

    def of(name: str) -> dict[str, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("servers")
            base = model_folder(name) if name in WITH_TEXTS else longer(name, folder / "base")
            own = OWN["llama3"] if name == "grouped" else OWN.get(name, {})
            made[name] = {
                "base": base,
                "draft": draft_of(base, folder / "draft"),
                "packed": folder / "packed",
                "a": make_adapter(folder / "a", base, seed=1, rank=3),
                "b": make_adapter(folder / "b", base, seed=2, rank=9, rslora=True, **own),
            }
        return made[name]

    return of


def longer(name: str, folder: Path) -> Path:
    """Makes the model of that architecture, for sequences as long as those of the other models."""
    entry = ENTRIES[name]
    replace(entry, options=entry.options | {"max_position_embeddings": LONGEST}).make(folder)
    return folder


def random_identity(chance: random.Random, folders: dict[str, Path]) -> dict[str, Any]:
    """Returns engine options that may change the bits of an answer."""
    identity: dict[str, Any] = {
        "kernels": chance.choice(("native", "native", "native", "native", "aten")),
        "dtype": chance.choice(("fp32", "bf16", "bf16")),
        "weight_dtype": chance.choice(("auto", "auto", "int8", "int4")),
        "kv_dtype": chance.choice(("auto", "fp8", "int8", "int8", "k8v4", "int4", "bf16")),
        "tp": chance.choice((1, 1, 2)),
        "block_size": chance.choice((16, 32, 64, 128)),
    }
    if chance.random() < 0.5:
        identity["adapters"] = {name: folders[name] for name in ("a", "b")}
    return identity


def random_service(chance: random.Random, folders: dict[str, Path], identity: dict[str, Any]) -> dict[str, Any]:
    """Returns engine options that change no bit: sizes, threads, the prefix cache, proposals, packed weights."""
    most = chance.choice((16, 33, 64, 200, 512))
    service: dict[str, Any] = {
        "kv_blocks": int(LONGEST // identity["block_size"] * chance.choice((1, 1.3, 2, 5))) + 1,
        "max_batched_tokens": most,
        "max_running": min(most, chance.choice((1, 3, 8, 16))),
        "prefix_cache": chance.random() < 0.8,
        "threads": chance.choice((1, 2)),
        "speculate": chance.choice((0, 0, 1, 4, 7)),
        "max_step_ms": chance.choice((None, None, None, 1.0, 20.0)),
    }
    if service["speculate"] and chance.random() < 0.6:
        service |= {"draft": folders["draft"], "draft_weight_dtype": chance.choice(("auto", "int8", "int4"))}
    if identity["kernels"] == "native" and chance.random() < 0.3:
        service["packed"] = folders["packed"]
    return service


def in_company(llm: LLM, requests: list[Request], chance: random.Random) -> list[Completion]:
    """Returns the answers to all requests, which come in any order, while some others are left early."""

    def leave(prompt: list[int], after: int) -> None:
        for _ in islice(llm.stream(prompt, LEFT_EARLY), after):
            pass

    with ThreadPoolExecutor(len(requests) + 4) as pool:
        left = [pool.submit(leave, chance.choice(requests)[0], chance.randint(1, 9)) for _ in range(4)]
        order = chance.sample(range(len(requests)), len(requests))
        asked = {number: pool.submit(ask, llm, requests[number]) for number in order}
        for each in left:
            each.result()
        return [asked[number].result() for number in range(len(requests))]


def ask(llm: LLM, request: Request) -> Completion:
    prompt, params, adapter = request
    [completion] = llm.generate([prompt], params, adapter=adapter)
    return completion


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed", [FEW, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(24) if seed != FEW)]
)
def test_no_answer_depends_on_how_it_is_served(
    folders: Callable[[str], dict[str, Path]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Its second turn meets blocks that the first has left in the prefix cache, where there is one."""
    chance = random.Random(seed)
    name = chance.choice((*WITH_TEXTS, *ENTRIES))
    made, has_texts = folders(name), name in WITH_TEXTS
    identity = random_identity(chance, made)
    service = random_service(chance, made, identity)
    names = ("", *identity.get("adapters", ()))
    prompts = random_prompts(chance, 12, VOCAB if name in WITH_TEXTS else VOCAB_OF_ENTRIES)
    requests = [(prompt, random_params(chance, has_texts), chance.choice(names)) for prompt in prompts]
    with LLM(made["base"], **identity, prefix_cache=False, threads=1) as llm:
        alone = [ask(llm, request) for request in requests]
    always_draft(monkeypatch)
    with LLM(made["base"], **identity, **service) as llm:
        for turn in range(2):
            for number, found in enumerate(in_company(llm, requests, chance)):
                assert said(found) == said(alone[number]), (turn, requests[number], name, identity, service)
        assert llm.engine.statistics.check_cache().problems == ()
