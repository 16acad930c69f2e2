"""README's first screen on a bare machine: its lines, as they stand there, lead to text that is streamed."""

import os
import resource
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tk.tests.house.test_first_screen import block
from tk.tests.real.interpreters import OWN, PATIENCE, bare, interpreter

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
PROMISE = 180.0  # seconds on two cores of its own, without the download of torch, which lies on this project's machines
CORES = 2


def streamed(lines: list[str], folder: Path, variables: dict[str, str]) -> float:
    """Runs lines in a shell; returns the seconds until the demo shows its first answer.

    Raises:
        AssertionError: a line failed, or no answer came.
    """
    start, seen, shown = time.monotonic(), 0.0, ""
    script = "\n".join(["set -e", *lines])
    command = ["bash", "-c", script]
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as shell:
        assert shell.stdout is not None
        for line in shell.stdout:
            shown += line
            if not seen and line.startswith("def read_lines(path):"):
                seen = time.monotonic() - start
    assert shell.returncode == 0, shown
    assert seen, shown
    return seen


def processor_seconds() -> float:
    """Returns the seconds that processors have worked for processes which this one started and which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shell(line: str, folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Starts one line in the environment that the first block has made."""
    words = ["bash", "-c", f". .venv/bin/activate; exec {line}"]
    return subprocess.Popen(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_install_and_three_commands_lead_to_streamed_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = interpreter(OWN)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "tk")], check=True)
    page = (ROOT / "README.md").read_text()
    demo, generate, serve = block(page, "Three commands")
    variables = bare(tmp_path, tmp_path / "python")
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "python3").symlink_to(python)
    folder = tmp_path / "tk"

    before = processor_seconds()
    seconds = streamed([*block(page, "Install"), demo], folder, variables)
    used, load = processor_seconds() - before, os.getloadavg()[0]
    with capsys.disabled():
        print(f"\nREADME to streamed text: {seconds:.0f} s and {used:.0f} s of processors, with load {load:.1f}")
    # Both are loose: other programs run beside `make real`. A busy machine takes longer, but works little more.
    assert used < 2 * CORES * PROMISE
    assert seconds < 2 * PROMISE or load > 2 * CORES, "the machine has little else to do"

    with shell(generate, folder, variables) as process:
        text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert len(text) > 20
    own = serve.replace("8000", "0") + " --port 0"  # another server of this machine may have the ports
    with shell(own, folder, variables) as process:
        assert process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("http "))
        with urllib.request.urlopen(f"http://{address}/", timeout=60) as answer:
            assert b"<title>" in answer.read()
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 0
