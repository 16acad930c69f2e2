"""The wheel and the sdist, installed on every Python of this machine, train and serve without checkout and compiler.

A Python other than that of `.venv` needs a CPU build of torch at hand; `TK_PYTHONS=all` takes CUDA's, some gigabytes.
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tk
from tk.tests.house.test_distributions import build
from tk.tests.house.test_packaging import pins
from tk.tests.real.interpreters import CPU_INDEX, OWN, bare, install, interpreter, run

pytestmark = [pytest.mark.real, pytest.mark.matrix, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
TORCH = f"torch=={dict(pins(ROOT))['torch']}"
MINORS = ("3.11", "3.12", "3.13", "3.14")


@dataclass(frozen=True)
class Built:
    """The folder of the two distributions, and their paths."""

    folder: Path
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    build(ROOT, [name for name in names.split("\0") if name], folder)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(folder, sdist, wheel)


@pytest.fixture(params=MINORS)
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The interpreter of an empty environment with torch, for each Python that is there."""
    program = interpreter(request.param)
    folder = tmp_path / "environment"
    run([program, "-m", "venv", folder], tmp_path, bare(tmp_path, program.parent))
    made = folder / "bin" / "python"
    install_torch(made, request.param, bare(tmp_path, made.parent))
    yield made
    shutil.rmtree(folder)


def install_torch(python: Path, minor: str, variables: dict[str, str]) -> None:
    """Installs the build for CPUs, or CUDA's where all Pythons are asked for; else the test is skipped."""
    try:
        install(python, ["--no-deps", "--no-compile", f"{TORCH}+cpu", *CPU_INDEX], python.parent, variables)
    except AssertionError:
        if minor != OWN and os.environ.get("TK_PYTHONS") != "all":
            pytest.skip(f"no CPU build of {TORCH} for Python {minor} is at hand (TK_PYTHONS=all takes CUDA's)")
    # With CUDA's build, or without it: the packages that torch needs.
    install(python, ["--no-compile", TORCH], python.parent, variables)


def sibling(python: Path, folder: Path, variables: dict[str, str]) -> Path:
    """Returns the interpreter of an environment that sees the packages of another one behind its own."""
    run([python, "-m", "venv", folder], folder.parent, variables)
    made = folder / "bin" / "python"
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, behind = (Path(run([each, "-c", show], folder, variables).strip()) for each in (made, python))
    (own / "behind.pth").write_text(str(behind))
    return made


def train(python: Path, folder: Path, variables: dict[str, str]) -> None:
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
    values = ("data.sources=[{path='tokens'}]", "train.steps=4", "optimizer.warmup_steps=1", "parallel.tp=2")
    command("train", "tiny.toml", "--nproc", "2", *(word for value in values for word in ("--set", value)))
    command("reshard", "runs/tiny", "tp1", "--tp", "1")
    command("verify", "tp1")


def serve(python: Path, folder: Path, variables: dict[str, str]) -> str:
    """Serves `tp1`, asks for text in three ways, and drains the server; returns what it logged."""
    greedy = ("Training", "--max-new-tokens", "8", "--temperature", "0")
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [python, "-m", "tk", "serve", "tp1", "--port", "0"],
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


def check(python: Path, tmp_path: Path, folder: Path) -> None:
    """An installation is whole and its own, and goes from text to text."""
    variables = bare(tmp_path, python.parent)
    folder.mkdir()
    found = run([python, "-c", "import tk; print(tk.__version__, tk.__file__)"], folder, variables).split()
    assert found[0] == tk.__version__
    assert Path(found[1]).is_relative_to(python.parents[1])
    assert not [name for name in ("cc", "gcc", "clang") if shutil.which(name, path=variables["PATH"])]
    train(python, folder, variables)
    assert "torch's kernels" in serve(python, folder, variables)


def test_wheel_and_sdist_train_and_serve_in_empty_environments(python: Path, built: Built, tmp_path: Path) -> None:
    variables = bare(tmp_path, python.parent)
    other = sibling(python, tmp_path / "other", variables)
    install(other, ["--no-deps", built.sdist], tmp_path, bare(tmp_path, other.parent))
    install(python, ["--no-compile", built.wheel], tmp_path, variables)
    run([python, "-m", "pip", "check"], tmp_path, variables)
    check(python, tmp_path, tmp_path / "by-wheel")
    check(other, tmp_path, tmp_path / "by-sdist")


def test_an_unpacked_sdist_runs_its_own_tests(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"tk_lm-{tk.__version__}"
    (source / ".build").mkdir()
    (source / ".build" / "tk").symlink_to("..")
    variables = os.environ | {"PYTHONPATH": str(source / ".build")}
    shown = run([sys.executable, "-m", "pytest", "tests/core", "-q", "-n", "0"], source, variables)
    assert " passed" in shown
    assert str(ROOT) not in run([sys.executable, "-c", "import tk; print(tk.__file__)"], source, variables)
