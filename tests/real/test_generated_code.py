"""The committed code of proto/ is, byte for byte, what its generator writes from the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

from tk.proto.v1 import generation_pb2 as pb

pytestmark = pytest.mark.real


def test_to_generate_the_code_again_changes_nothing(generator: Path, tmp_path: Path) -> None:
    done = subprocess.run([generator, sys.executable, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    committed = {path.name: path.read_text() for path in Path(pb.__file__).parent.glob("*_pb2*.py*")}
    generated = {path.name: path.read_text() for path in (tmp_path / "tk" / "proto" / "v1").iterdir()}
    assert sorted(generated) == sorted(committed)
    assert [name for name in generated if generated[name] != committed[name]] == [], "run `make proto`"
