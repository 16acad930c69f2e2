"""The committed code of proto/ is, byte for byte, what its generator writes from the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

import tk.proto

pytestmark = pytest.mark.real


def generated_files(folder: Path) -> dict[Path, str]:
    """Returns the texts of the generated files in the packages of a folder."""
    return {path.relative_to(folder): path.read_text() for path in folder.glob("*/*_pb2*.py*")}


def test_to_generate_the_code_again_changes_nothing(generator: Path, tmp_path: Path) -> None:
    done = subprocess.run([generator, sys.executable, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    committed = generated_files(Path(tk.proto.__file__).parent)
    generated = generated_files(tmp_path / "tk" / "proto")
    assert len(generated) == 5
    assert sorted(generated) == sorted(committed)
    assert [name for name in generated if generated[name] != committed[name]] == [], "run `make proto`"
