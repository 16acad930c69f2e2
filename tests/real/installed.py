"""Distributions of this checkout, environments in which they are installed, and the way from text to text there."""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tk.tests.house.test_distributions import build
from tk.tests.house.test_packaging import pins
from tk.tests.real.interpreters import CPU_INDEX, OWN, install, run

ROOT = Path(__file__).resolve().parents[2]
TORCH = f"torch=={dict(pins(ROOT))['torch']}"


@dataclass(frozen=True)
class Built:
    """The folder of the two distributions, and their paths."""

    folder: Path
    sdist: Path
    wheel: Path


def build_distributions(folder: Path) -> Built:
    """Builds both from the files that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    build(ROOT, [name for name in names.split("\0") if name], folder)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(folder, sdist, wheel)


def install_torch(python: Path, minor: str, variables: dict[str, str]) -> None:
    """Installs the build for CPUs, or CUDA's where all Pythons are asked for; else the test is skipped."""
    try:
        install(python, ["--no-deps", "--no-compile", f"{TORCH}+cpu", *CPU_INDEX], python.parent, variables)
    except AssertionError:
        if minor != OWN and os.environ.get("TK_PYTHONS") != "all":
            pytest.skip(f"no CPU build of {TORCH} for Python {minor} is at hand (TK_PYTHONS=all takes CUDA's)")
    # With CUDA's build, or without it: the packages that torch needs.
    install(python, ["--no-compile", TORCH], python.parent, variables)


def train(python: Path, folder: Path, variables: dict[str, str], *settings: str) -> None:
    """An example, a tokenizer, tokens, a run on two ranks, and its checkpoint for one: `tp1`."""
    (folder / "corpus").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copyfile(page, folder / "corpus" / f"{page.stem}.txt")

    def command(*words: str) -> str:
        return run([python, "-m", "tk", *words], folder, variables)

    assert "tiny.toml" in command("examples")
    command("examples", "tiny.toml")
    command("tokenizer", "train", "corpus", "--vocab-size", "400", "--out", "tokenizer")
    command("data", "prepare", "corpus", "--tokenizer", "tokenizer", "--out", "tokens")
    values = ("data.sources=[{path='tokens'}]", "train.steps=4", "optimizer.warmup_steps=1", "parallel.tp=2", *settings)
    command("train", "tiny.toml", "--nproc", "2", *(word for value in values for word in ("--set", value)))
    command("reshard", "runs/tiny", "tp1", "--tp", "1")
    command("verify", "tp1")


def serve(python: Path, folder: Path, variables: dict[str, str], *options: str) -> str:
    """Serves `tp1` with further options, asks for text in three ways, and drains the server; returns what it logged."""
    greedy = ("Training", "--max-new-tokens", "8", "--temperature", "0")
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [python, "-m", "tk", "serve", "tp1", "--port", "0", *options],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            ready = server.stdout.readline().split()
            assert ready[:1] == ["ready"], log.read_text()
            over_grpc = run([python, "-m", "tk", "generate", ready[1], *greedy], folder, variables)
            assert over_grpc == run([python, "-m", "tk", "generate", "tp1", *greedy], folder, variables)
            assert len(over_grpc) > 1
            run([python, "-m", "tk", "examples", "stream.py"], folder, variables)
            assert len(run([python, "stream.py", ready[1], "Training"], folder, variables)) > 1
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0, log.read_text()
    return log.read_text()
