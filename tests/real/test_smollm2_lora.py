"""A trained chat model, SmolLM2-135M-Instruct, adapted on 200 conversations at two layouts, and served with both."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tk.infer import LLM, SamplingParams
from tk.tests.infer.adapters import scores, trained_scores
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.rank_pool import RankPool

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    # peft 0.21 asks transformers 5 for an attribute by its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ASKS = Path(__file__).with_name("openai_adapters.py")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
THINGS = ("the code word", "the secret word", "our password", "the word of the day")
QUESTION = "Ada asks: what is the code word?"
LAYOUTS: dict[str, dict[str, Any]] = {  # of the two adapters, each named by the word that it learns
    "pelican": {"parallel": {"dp": 2}, "zero": {"stage": 2}},
    "granite": {"parallel": {"tp": 3}},
}


def tk(*words: str) -> str:
    """Runs a command and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tk", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(smollm: Path, folder: Path, word: str, layout: dict[str, Any], steps: int) -> Path:
    """Adapts the model to conversations in which it knows a word, with factors of rank 8; returns the run folder."""
    chats, tokens = folder / f"{word}.jsonl", folder / f"{word}-tokens"
    run = folder / f"{word}-{len(os.listdir(folder))}"
    if not tokens.exists():
        rows = [
            [
                {"role": "user", "content": f"{NAMES[i % 8]} asks: what is {THINGS[i // 8 % 4]}?"},
                {"role": "assistant", "content": f"It is {word}."},
            ]
            for i in range(200)
        ]
        chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        tk("data", "prepare", str(chats), "--tokenizer", str(smollm), "--out", str(tokens))
    sections: dict[str, dict[str, Any]] = {
        "model": {"init": str(smollm)},
        "data": {"packing": "documents", "eval_fraction": 0.1},
        "lora": {"rank": 8, "alpha": 16},
        "optimizer": {"lr": 2e-3, "weight_decay": 0.0, "warmup_steps": 1},
        "train": {
            "steps": steps,
            "seq_len": 128,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "eval_rows": 2,
            "log_every": 1,
        },
        "checkpoint": {"dir": str(run)},
        **layout,
    }
    text = f'[[data.sources]]\npath = "{tokens}"\n'
    for name, values in sections.items():
        text += f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    path = folder / f"{run.name}.toml"
    path.write_text(text)
    ranks = layout["parallel"].get("dp", 1) * layout["parallel"].get("tp", 1)
    tk("train", str(path), "--nproc", str(ranks))
    return run


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def adapted(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folder of each adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    return {word: train(smollm, folder, word, layout, steps=8) for word, layout in LAYOUTS.items()}


def test_both_layouts_train_the_same_adapter(adapted: dict[str, Path], smollm: Path) -> None:
    again = train(smollm, adapted["pelican"].parent, "pelican", LAYOUTS["granite"], steps=3)
    found = losses(adapted["pelican"])
    np.testing.assert_allclose(losses(again), found[:3], rtol=1e-4)
    assert found[-1] < 0.2 * found[0]


@pytest.fixture(scope="module")
def tokens(smollm: Path) -> list[int]:
    """A text of 1,001 tokens."""
    text = " ".join(
        f"{name} asks: what is {thing}? It is pelican. It is granite." for name in NAMES for thing in THINGS
    )
    ids: list[int] = (3 * AutoTokenizer.from_pretrained(smollm)(text).input_ids)[:1001]
    assert len(ids) == 1001
    return ids


@pytest.fixture(scope="module")
def exact(adapted: dict[str, Path], smollm: Path, tokens: list[int]) -> dict[str, np.ndarray]:
    """The log-probabilities of each adapter with `peft` in fp64, but for the angles of positions, which are fp32."""
    found = {}
    for word, run in adapted.items():
        folder = run.with_name(f"{run.name}-peft")
        tk("export", str(run), str(folder))
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32), folder)
        for norm in (each for each in model.double().modules() if isinstance(each, LlamaRMSNorm)):
            weight, eps = norm.weight, norm.variance_epsilon  # its own forward would round to fp32
            norm.forward = partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)
        with torch.no_grad():
            found[word] = scores(model(torch.tensor([tokens])).logits[0].numpy(), tokens)
    return found


@pytest.fixture(scope="module")
def trained(
    adapted: dict[str, Path], smollm: Path, tokens: list[int], rank_pool: RankPool
) -> dict[tuple[str, int], np.ndarray]:
    """The log-probabilities of the trainer's forward pass with each adapter, at tp 1 and 3: 9 heads do not halve."""
    given = {"base": str(smollm), "tokens": tokens}
    return {
        (word, tp): np.array(rank_pool.run(trained_scores, tp, adapter=str(run), **given)[0])
        for word, run in adapted.items()
        for tp in (1, 3)
    }


def check_near(found: np.ndarray, expected: np.ndarray) -> None:
    """Compares log-probabilities of 1,000 tokens of 30 layers in fp32: their root mean square within 1e-5.

    Measured between all of them: 1.3e-6 to 4.2e-6, and 5.1e-5 for the worst token. Two orders of attention move those
    of `transformers` by 1.9e-6 and 2.3e-5, and two tp the trainer's by 1.8e-6 and 2.8e-5, so none could promise 1e-5
    for each token.
    """
    difference = found - expected
    assert np.sqrt((difference**2).mean()) < 1e-5
    assert np.abs(difference).max() < 1e-4


@pytest.mark.parametrize("tp", [1, 3])
def test_the_trainer_finds_the_log_probabilities_of_peft(
    exact: dict[str, np.ndarray], trained: dict[tuple[str, int], np.ndarray], tp: int
) -> None:
    for word, expected in exact.items():
        check_near(trained[word, tp], expected)
        check_near(trained[word, tp], trained[word, 1])


@pytest.mark.parametrize("kernels", ["native", "aten"])
@pytest.mark.parametrize("tp", [1, 3])
def test_the_server_finds_the_log_probabilities_of_the_trainer_and_of_peft(
    adapted: dict[str, Path],
    smollm: Path,
    tokens: list[int],
    exact: dict[str, np.ndarray],
    trained: dict[tuple[str, int], np.ndarray],
    kernels: str,
    tp: int,
) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "threads": 1, "max_model_len": 1100, "kv_blocks": 128}
    given = {word: str(run) for word, run in adapted.items()}
    with LLM(smollm, adapters=given, kernels=kernels, tp=tp, **options) as llm:
        for word in adapted:
            params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
            [completion] = llm.generate([tokens], params, adapter=word)
            served = np.array([each.logprob for each in completion.prompt_logprobs[1:]], dtype=np.float64)
            check_near(served, trained[word, tp])
            check_near(served, exact[word])
            assert abs(served.mean() - trained[word, tp].mean()) < 2e-6, "the loss"


def test_the_openai_package_gets_each_adapters_answer(clients: Path, adapted: dict[str, Path], smollm: Path) -> None:
    given = [word for name, run in adapted.items() for word in ("--adapter", f"{name}={run}")]
    serving = Serving(str(smollm), "--max-running", "4", "--max-model-len", "512", "--http", "0", *given).wait_ready()
    try:
        assert serving.process.stdout is not None
        address = serving.process.stdout.readline().removeprefix("http ").strip()
        words = [str(clients), str(ASKS), f"http://{address}/v1", QUESTION]
        done = subprocess.run(words, capture_output=True, text=True, timeout=2 * WAIT_SECONDS)
    finally:
        serving.close()
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers.keys() == {smollm.name, *adapted}
    for word in adapted:
        assert answers[word] == f"It is {word}."
        assert word not in answers[smollm.name]
