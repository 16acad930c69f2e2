"""The files of examples/: scripts say which argument they want, and the commands in comments are commands."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tk.tests.docs.blocks import ROOT
from tk.tests.docs.shell import commands
from tk.tests.docs.test_pages import check_command

EXAMPLES: Final = ROOT / "examples"


@pytest.mark.parametrize("name", ["stream.py", "clients/python/client.py", "deploy/probe.py"])
def test_a_script_without_its_argument_asks_for_it(tmp_path: Path, name: str) -> None:
    for generated in ("generation_pb2", "generation_pb2_grpc"):  # which a user of the client makes
        (tmp_path / f"{generated}.py").write_text(f"from tk.proto.v1.{generated} import *\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, env=environment)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert re.search(r"HOST:PORT|required: target", done.stderr.splitlines()[-1])


def test_commands_in_comments_name_what_exists() -> None:
    comments = re.compile(r"^# +((?:tk|python examples).*)$", re.MULTILINE)
    lines = [line for path in EXAMPLES.rglob("*.toml") for line in comments.findall(path.read_text())]
    assert len(lines) > 8
    for words in commands("\n".join(lines)):
        check_command(words)
