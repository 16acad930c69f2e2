"""The wheel and the sdist, installed on every Python of this machine, train and serve without checkout and compiler.

A Python other than that of `.venv` needs a CPU build of torch at hand; `TK_PYTHONS=all` takes CUDA's, some gigabytes.
"""

import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tk
from tk.tests.real.installed import ROOT, Built, build_distributions, install_torch, serve, train
from tk.tests.real.interpreters import bare, install, interpreter, run

pytestmark = [pytest.mark.real, pytest.mark.matrix, pytest.mark.timeout(3600)]
MINORS = ("3.11", "3.12", "3.13", "3.14")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_distributions(tmp_path_factory.mktemp("dist"))


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


def sibling(python: Path, folder: Path, variables: dict[str, str]) -> Path:
    """Returns the interpreter of an environment that sees the packages of another one behind its own."""
    run([python, "-m", "venv", folder], folder.parent, variables)
    made = folder / "bin" / "python"
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, behind = (Path(run([each, "-c", show], folder, variables).strip()) for each in (made, python))
    (own / "behind.pth").write_text(str(behind))
    return made


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
