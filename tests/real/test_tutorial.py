"""docs/tutorial.md, as a reader follows it: its commands, in their order, in an empty folder with an empty home."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tk.tests.docs.blocks import read_blocks

pytestmark = [pytest.mark.real, pytest.mark.matrix]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BOUND = 1200  # seconds, also on a machine that others share: docs/benchmarks/tutorial.md
SERVE = "tk serve "


def blocks() -> list[tuple[str, str]]:
    """Returns the page's blocks of shell and Python."""
    found = read_blocks("docs/tutorial.md", PAGE.read_text())
    return [(block.kind, block.code) for block in found if block.kind in ("sh", "python")]


class Reader:
    """Someone who types the page's blocks.

    Args:
        folder: an empty folder, for the home and the current directory.

    Attributes:
        said, noted: what each block has printed on standard output and error.
    """

    def __init__(self, folder: Path) -> None:
        for name in ("home", "work"):
            (folder / name).mkdir()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.work = folder / "work"
        self.said: list[str] = []
        self.noted: list[str] = []
        self.server: subprocess.Popen[str] | None = None
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if name in ("LANG", "OMP_NUM_THREADS")}
        self.environment = {"PATH": programs, "HOME": str(folder / "home"), **kept}

    def type(self, kind: str, code: str) -> None:
        """Runs a block; a server stays until the next one, and this waits until it is ready."""
        code = code.replace("8000", str(self.port))
        if code.startswith(SERVE):
            self.stop()
            words = ["bash", "-c", f"exec {code.strip()} --port 0"]
            self.server = subprocess.Popen(
                words, cwd=self.work, env=self.environment, stdout=subprocess.PIPE, text=True
            )
            assert self.server.stdout is not None
            assert self.server.stdout.readline().startswith("ready ")
            assert str(self.port) in self.server.stdout.readline()
            return
        words = [sys.executable, "-c", code] if kind == "python" else ["bash", "-e", "-c", code]
        done = subprocess.run(words, cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=BOUND)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        self.said.append(done.stdout)
        self.noted.append(done.stderr)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Asks the server as the page in a browser does."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://localhost:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read(), "utf-8")

    def stop(self) -> None:
        """Ends the server as Ctrl-C does."""
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(60) == 0
            self.server.communicate()
            self.server = None


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    if reader.server is not None:
        reader.server.kill()
        reader.server.communicate()


@pytest.mark.timeout(2 * BOUND)
def test_the_page_leads_to_a_chat_and_to_openais_client(reader: Reader, capfd: pytest.CaptureFixture[str]) -> None:
    start, seconds = time.monotonic(), {}
    for kind, code in blocks():
        reader.type(kind, code)
        if code.startswith(SERVE):
            run = code.split()[2].removeprefix("runs/")
            assert 'id="prompt"' in reader.ask("/")
            [model] = json.loads(reader.ask("/v1/models"))["data"]
            assert model["id"] == run
            assert model["has_chat_template"] == (run == "helper")
            seconds[run] = time.monotonic() - start
    reader.stop()
    with capfd.disabled():
        print("".join(f"\ndocs/tutorial.md: {name} serves after {taken:.0f} s" for name, taken in seconds.items()))
    said = "\n".join(reader.said)
    assert re.search(r'"completion_tokens": ?[1-9]', said), "that of curl"
    assert re.search(r"\w+ \w+", reader.said[-1]), "the answer to OpenAI's client"
    for line in re.findall(r"^\w+(?:\.toml|-tokenizer): .*$", PAGE.read_text(), re.MULTILINE):
        assert form(line) in map(form, said.splitlines())
    typed = re.findall(r"^tk (?:tokenizer|data|train) .*$", "".join(code for _, code in blocks()), re.MULTILINE)
    noted = [line.strip() for line in "".join(reader.noted).splitlines()]
    assert [line for line in typed if line not in noted] == [], "tk init printed them"
    losses = {run: eval_losses(reader.work / "runs" / run / "metrics.jsonl") for run in seconds}
    assert losses["mine"][-1] < min(6.0, losses["mine"][0])
    assert losses["helper"][-1] < losses["helper"][0]
    assert seconds["mine"] < BOUND


def form(line: str) -> str:
    """Returns a line of output without its numbers and plurals, which differ from machine to machine."""
    return re.sub(r"\d[\d.,]* ?(\w+?)s?\b", r"N \1", line)


def eval_losses(metrics: Path) -> list[float]:
    """Returns the losses on held-out tokens, from first to last."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def test_the_files_of_the_page_are_the_readers_own() -> None:
    code = "".join(code for _, code in blocks())
    assert not re.search(r"examples/|/work|\.\./", code)
