"""The demo as a newcomer runs it, on real text, and its results: the model, the checkpoints and the memory."""

import json
import keyword
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tk.checkpoint.read.reader import Checkpoint
from tk.cli.main import main
from tk.data import stdlib
from tk.data.corpus import Corpus
from tk.data.sources import stdlib_corpus
from tk.infer import LLM, Client, SamplingParams
from tk.tests.cli.process_tree import PeakMemory
from tk.tests.infer.serve.serving import Serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = ("def main(", "class Node:\n", "import os\n", "    def run(self")
# Prompts that code follows, not prose. Even of real text a quarter of such samples has fewer than three keywords.
CODE = (
    "def read(self, path):\n    if not ",
    "    def __init__(self, name=None):\n        ",
    "    for line in lines:\n        if ",
    "    try:\n        ",
    "        if self._closed:\n            ",
)
VOCAB_SIZE = 2048
FULL = 250  # steps, as `tk demo` makes them without an option
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@dataclass(frozen=True)
class Demo:
    """A finished demo: its steps, its folder, its output, and the peak memory of all its processes together."""

    steps: int
    folder: Path
    output: str
    peak_bytes: int


@pytest.fixture(params=[5, pytest.param(FULL, marks=pytest.mark.matrix)])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo of few steps shows that all parts work together, one of all steps that the model learns."""
    steps: int = request.param
    folder = tmp_path_factory.mktemp("demo") / "run"
    if steps < FULL:
        prepare_a_part_of_the_corpus(folder.with_name("stdlib"))
    options = [] if steps == FULL else ["--steps", str(steps)]
    command = [sys.executable, "-m", "tk", "demo", "--out", str(folder), *options]
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "OMP_NUM_THREADS"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    with PeakMemory(process.pid) as memory:
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    yield Demo(steps, folder, output, memory.peak_bytes)
    shutil.rmtree(folder)


def prepare_a_part_of_the_corpus(cache: Path) -> None:
    """Fills the demo's cache with an eighth of the files; all of them take a third of the time of a demo of few steps.

    The cache is the one of this version of Python, so that the demo uses it as if an earlier one had made it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib, "stdlib_corpus", lambda: Corpus(stdlib_corpus().files[::8]))
        stdlib.prepare_stdlib(cache, VOCAB_SIZE)


def check_that_it_learns(demo: Demo) -> None:
    lines = [json.loads(line) for line in (demo.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < (0.6 if demo.steps == FULL else 0.9) * losses[0]
    row = re.search(r"held-out loss +([\d.]+) \(unigram entropy ([\d.]+)\)", demo.output)
    assert row
    held_out, entropy = map(float, row.groups())
    ignorance = math.log(VOCAB_SIZE)  # the loss of a uniform distribution
    assert held_out < (entropy - 1.5 if demo.steps == FULL else ignorance - 0.5)
    assert held_out == pytest.approx([line["eval_loss"] for line in lines if "eval_loss" in line][-1], abs=1e-3)


def check_that_it_shows_the_whole_story(demo: Demo) -> None:
    for shown in ("health SERVING", "def read_lines(path):", "at tp 2, ZeRO-1", "at tp 1, in", "KV cache", "Next:"):
        assert shown in demo.output
    assert Checkpoint.open(demo.folder / "run").layout.tp == 2
    resharded = Checkpoint.open(demo.folder / "tp1")
    assert resharded.layout.tp == 1
    assert not resharded.verify().problems


def check_that_its_samples_look_like_python(demo: Demo) -> None:
    common = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=100, ignore_eos=True)
    params = [replace(common, seed=seed) for seed in range(20)]
    with LLM(demo.folder / "run", kv_dtype="int8", max_model_len=512) as llm:
        samples = llm.generate([CODE[seed % len(CODE)] for seed in range(20)], params)
    assert all(len(sample.token_ids) == 100 for sample in samples)
    keywords = [len(set(re.findall(r"[A-Za-z_]+", sample.text)) & set(keyword.kwlist)) for sample in samples]
    assert sum(count >= 3 for count in keywords) >= 15, keywords


def check_that_transformers_generates_the_same_tokens_from_the_export(demo: Demo) -> None:
    exported = demo.folder / "hugging-face"
    assert main(["export", str(demo.folder / "run"), str(exported)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(exported)
    reference = LlamaForCausalLM.from_pretrained(exported, dtype=torch.float32)
    # It serves the export instead of the run, whose fp32 masters are not the bf16 weights of the export.
    serving = Serving(str(exported), "--dtype", "fp32", "--kv-dtype", "fp32").wait_ready()
    try:
        with Client(serving.target) as client:
            completions = client.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_new_tokens=40))
    finally:
        serving.close()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = reference.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
        assert list(completion.token_ids) == expected, prompt


def check_that_a_flipped_bit_is_found_and_never_served(
    demo: Demo, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    shards = sorted(path.name for path in (demo.folder / "run").glob(f"step-*/{kind}*.safetensors"))
    assert len(shards) >= 2, "a shard for each rank"
    for shard in shards if demo.steps == FULL else shards[:2]:
        damaged = tmp_path / shard
        shutil.copytree(demo.folder / "run", damaged)
        path = next(damaged.glob(f"step-*/{shard}"))
        data = bytearray(path.read_bytes())
        data[len(data) * 2 // 3] ^= 0x10
        path.write_bytes(data)
        commands = [["verify", str(damaged)]]
        if kind == "model":  # optimizer states are not served
            commands.append(["serve", str(damaged), "--port", "0"])
        for command in commands:
            assert main(command) == 3
            output, errors = capfd.readouterr()
            assert shard in output + errors
            assert re.search(r"(model\.|lm_head\.)[a-z_.0-9]+weight", output + errors), "the tensor is named"
            assert "ready" not in output


def test_it_learns_and_its_results_are_sound(demo: Demo, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One test, since several would run the demo once on each of pytest's workers."""
    check_that_it_learns(demo)
    check_that_it_shows_the_whole_story(demo)
    assert 0.3e9 < demo.peak_bytes < 4e9, "all its processes together"
    check_that_transformers_generates_the_same_tokens_from_the_export(demo)
    for kind in ("model", "optim"):
        check_that_a_flipped_bit_is_found_and_never_served(demo, tmp_path, capfd, kind)
    if demo.steps == FULL:
        check_that_its_samples_look_like_python(demo)
