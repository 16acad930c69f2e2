"""The sdist and the wheel, built from the files that git knows: what they hold, and that no warning is left."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata

import tk
from tk.infer.serve.openai.page.files import FILES as PAGE_FILES
from tk.tests.house.conftest import ROOMS

BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
ADDED = {"PKG-INFO", "setup.cfg"}  # by setuptools, beside the folder tk_lm.egg-info


def build(root: Path, names: list[str], folder: Path) -> str:
    """Builds the sdist and the wheel of some files of the checkout in `folder`; returns what setuptools says."""
    source = folder / "source"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, source / name, follow_symlinks=False)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def warnings(said: str) -> list[str]:
    """Returns the lines in which setuptools complains about something."""
    return re.findall(r"^warning:.*|^.*Warning: .*|^no previously-included .*", said, re.MULTILINE)


def check_the_sdist(path: Path, names: list[str]) -> Metadata:
    """The sdist holds the checkout, with tests, pages and the Makefile."""
    top = f"tk_lm-{tk.__version__}/"
    with tarfile.open(path) as archive:
        files = {each.name.removeprefix(top) for each in archive if not each.isdir()}
        about = archive.extractfile(f"{top}PKG-INFO")
        assert about is not None
        metadata = Metadata.from_email(about.read())
    made = {name for name in files if name.startswith("tk_lm.egg-info/")}
    assert files - made - ADDED == {name for name in names if Path(name).name != ".gitignore"}
    return metadata


def check_the_wheel(path: Path, names: list[str], project: dict[str, Any]) -> None:
    """The wheel holds tk with its examples, and nothing else."""
    files = {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}
    examples = {f"tk/{name}" for name in names if name.startswith("examples/")}
    assert examples == {name for name in files if name.startswith("tk/examples/")}
    folders = {Path(*name.split(".")) for name in project["tool"]["setuptools"]["packages"]}
    native = {f"tk/{name}" for name in names if re.fullmatch(rf"({'|'.join(ROOMS)})/.*\.[ch]", name)}
    assert {Path(name).parent for name in files - native - examples} <= folders
    assert native <= files
    assert {f"tk/infer/serve/openai/page/{name}" for _, name, _ in PAGE_FILES} <= files
    assert {"tk/py.typed", "tk/__main__.py", "tk/proto/v1/generation.proto", "tk/proto/v1/generation_pb2.pyi"} <= files


def test_the_sdist_is_the_checkout_and_the_wheel_is_tk_and_its_examples(
    root: Path, tracked: list[str], project: dict[str, Any], tmp_path: Path
) -> None:
    """One test, since several would build once on each of pytest's workers."""
    said = build(root, tracked, tmp_path)
    assert warnings(said) == []
    metadata = check_the_sdist(tmp_path / f"tk_lm-{tk.__version__}.tar.gz", tracked)
    check_the_wheel(tmp_path / f"tk_lm-{tk.__version__}-py3-none-any.whl", tracked, project)
    assert (metadata.name, str(metadata.version)) == ("tk-lm", tk.__version__)
    assert sorted(metadata.provides_extra or ()) == sorted(project["project"]["optional-dependencies"])


def test_complaints_of_setuptools_are_seen() -> None:
    said = (
        "writing manifest file\nwarning: no files found matching 'x'\n"
        "build_py.py:215: _Warning: Package 'a' is absent\nno previously-included directories found matching 'y'\n"
        "copying core/warnings.py -> build/lib"
    )
    assert len(warnings(said)) == 3
