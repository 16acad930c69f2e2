"""The parts of `make gpu-check`: each takes at most ten minutes by itself, and one that fails leaves the others alone.

A part runs commands of this machine's python one after another. Its output goes to this terminal and to a file; the
figures that benchmarks report become rows of a table for docs/benchmarks/gpu.md.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

LIMIT: Final = 570.0  # seconds of a part
FIGURES_VARIABLE: Final = "TK_FIGURES"
_COUNTS: Final = re.compile(r"^((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s", re.MULTILINE)  # of pytest's last line
_SOME_RAN: Final = re.compile(r"\b[1-9]\d* (?:passed|failed|error)")
# pytest-benchmark, where that python has it, warns beside `-n`, and warnings are errors here.
_PYTEST: Final = ("pytest", "-p", "no:benchmark", "-q")
_GPU: Final = (*_PYTEST, "-m", "gpu")
_CUDA_TESTS: Final = "tests/train/test_cuda.py"
_LAYOUTS: Final = "tests/train/test_layouts_on_gpu.py"
_KERNELS: Final = "tests/infer/engine/kernels"


@dataclass(frozen=True, slots=True)
class GpuPart:
    """One part.

    Attributes:
        name: its name on the command line.
        what: what it shows, for the table.
        commands: the module of each command with its arguments.
    """

    name: str
    what: str
    commands: tuple[tuple[str, ...], ...]


def _bench(*contenders: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("tk.benchmarks.gpu_contender", each) for each in contenders)


PARTS: Final = (
    GpuPart(
        "kernels",
        "kernels against oracles, compiled",
        (
            (*_GPU, "tests/train/context", "tests/train/engine"),
            # Most of the time each test compiles, on one core.
            (*_PYTEST, "-n", "4", "-m", "triton", _KERNELS),
        ),
    ),
    GpuPart(
        "serving",
        "tokens, greedy and sampled, against the CPU and transformers",
        ((*_GPU, "tests/infer", f"--ignore={_KERNELS}"),),
    ),
    GpuPart("checkpoint", "a checkpoint to the CPU and back", ((*_GPU, _CUDA_TESTS, "-k", "checkpoint"),)),
    GpuPart("training", "models of every kind train as on a CPU", ((*_GPU, _CUDA_TESTS, "-k", "not checkpoint"),)),
    GpuPart("layouts", "layouts over gloo on one GPU, over NCCL on several", ((*_GPU, _LAYOUTS),)),
    GpuPart("limits", "products, copies, and attention in tiles", _bench("limits", "tiles")),
    GpuPart(
        "speed",
        "training of 1.1 B parameters at 4,096 beside transformers and torchtitan",
        _bench("train-tk", "train-tk-compile", "train-transformers", "train-transformers-compile", "train-torchtitan"),
    ),
    GpuPart("saves", "how long training waits for a save", _bench("save-tk")),
    GpuPart(
        "decode",
        "decoding beside transformers and vLLM",
        _bench("decode-tk", "decode-transformers", "decode-vllm"),
    ),
)


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """How a part ended.

    Attributes:
        name: its name.
        what: what it shows.
        passed: whether all commands ended well.
        result: what happened: the numbers of tests, and what each command that failed did.
        seconds: how long it took.
        figures: the names and values that its benchmarks reported.
    """

    name: str
    what: str
    passed: bool
    result: str
    seconds: float
    figures: tuple[tuple[str, str], ...] = ()


def run_part(
    part: GpuPart,
    folder: Path,
    root: Path,
    environment: Mapping[str, str],
    more: Sequence[str] = (),
    limit: float = LIMIT,
) -> PartOutcome:
    """Runs a part; writes its output to NAME.log and its outcome to NAME.json in `folder`.

    Each command may take its share of the time that is left, so that one without an end leaves the others theirs.

    Args:
        part: its commands.
        folder: the folder of all parts' output.
        root: the folder in which commands run.
        environment: the variables of all commands.
        more: further arguments of pytest.
        limit: the seconds that all commands may take.
    """
    start, failures = time.monotonic(), []
    figures = folder.absolute() / f"{part.name}.figures"
    figures.unlink(missing_ok=True)
    with (folder / f"{part.name}.log").open("wb") as log:
        for number, command in enumerate(part.commands):
            arguments = [*command, *(more if command[0] == "pytest" else ())]
            share = (limit - (time.monotonic() - start)) / (len(part.commands) - number)
            code = _run(arguments, root, {**environment, FIGURES_VARIABLE: str(figures)}, log.fileno(), share)
            name = "pytest" if command[0] == "pytest" else command[-1]
            if code is None:
                failures.append(f"{name}: stopped after {share:.0f} s")
            elif code:
                failures.append(f"{name}: exit code {code}")
            elif name == "pytest" and not _some_ran(folder / f"{part.name}.log"):
                failures.append(f"{name}: no test ran")
    lines = figures.read_text().splitlines() if figures.exists() else []
    found = tuple((str(name), str(value)) for name, value in map(json.loads, lines))
    counts = _COUNTS.findall((folder / f"{part.name}.log").read_text(errors="replace"))
    result = "; ".join([*counts, *failures]) or "passed"
    outcome = PartOutcome(part.name, part.what, not failures, result, time.monotonic() - start, found)
    (folder / f"{part.name}.json").write_text(json.dumps(asdict(outcome)))
    return outcome


def _some_ran(log: Path) -> bool:
    """Returns whether the last of the runs of pytest in a part's output ran a test, and did not skip all of them."""
    counts = _COUNTS.findall(log.read_text(errors="replace"))
    return bool(counts) and _SOME_RAN.search(counts[-1]) is not None


def _run(arguments: Sequence[str], root: Path, environment: Mapping[str, str], log: int, seconds: float) -> int | None:
    """Runs `python -m ARGUMENTS`; returns its exit code, or None if it was stopped with all that it had started."""
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def outcomes_in(folder: Path) -> list[PartOutcome]:
    """Returns the outcomes of all parts that have run, also in earlier calls, in the order of PARTS."""
    found = []
    for part in PARTS:
        path = folder / f"{part.name}.json"
        if path.exists():
            stored = json.loads(path.read_text())
            found.append(PartOutcome(**stored | {"figures": tuple(map(tuple, stored["figures"]))}))
    return found


def markdown(machine: str, outcomes: Sequence[PartOutcome]) -> str:
    """Returns the tables for docs/benchmarks/gpu.md: the parts, and the figures."""
    lines = [machine, "", "| part | shows | result | seconds |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.what} | {_cell(each.result)} | {each.seconds:.0f} |" for each in outcomes]
    rows = [f"| {_cell(name)} | {_cell(value)} |" for each in outcomes for name, value in each.figures]
    if rows:
        lines += ["", "| | figure |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
