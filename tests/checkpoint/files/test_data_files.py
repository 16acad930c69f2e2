"""Many data files, few of them open."""

import os
import resource
import subprocess
import sys
from pathlib import Path

from tk.checkpoint import Checkpoint


def test_few_files_are_open_at_once(llama_step: Path, tmp_path: Path) -> None:
    """32 files are written where a process may have 24 open."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    command = [sys.executable, "-m", "tk", "reshard", str(llama_step), str(tmp_path / "new"), "--tp", "4", "--pp", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == 32
    assert Checkpoint.open(tmp_path / "new").verify().ok
