"""The peak memory of loading, as the kernel counts it: `python peak_memory.py FOLDER`, a line for each broken step.

Every step is loaded by a forked child of one warmed-up process, so that the peaks of children differ only by what
loading makes them allocate. Small steps are the corpus of broken checkpoints, large ones have files of 4 MiB,
in `make test-all` of 16.
"""

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tk.checkpoint import NewStep, RunFolder, commit, write_part
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.ownership import Owned
from tk.core.tensors import TensorSpec
from tk.scripts.broken_checkpoints import CASES, explain, flip, make_good, write_manifest, write_part_data

LARGE = 2 ** (24 if os.environ.get("TK_EVERY_EXAMPLE") else 22)  # bytes
DATA = "model-00000.safetensors"


def make_large(run: Path) -> Path:
    """A step of one tensor and one side file of LARGE bytes each."""
    spec = TensorSpec("weight", (LARGE // 4,), dtype="F32")
    item = Owned(spec.name, "weight", Box.whole(spec.shape))
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(1)
        write_part(folder, 0, (spec,), [(item, "F32", np.ones(spec.shape, np.float32))])
        files = {"config.json": b"{}", "tokenizer.json": b" " * (LARGE - 2) + b"{}"}
        return commit(locked, NewStep(1, (spec,), Layout(), side_files=files))


def crafted(unit: bytes) -> bytes:
    """LARGE bytes of an array's beginning."""
    return b'{"format":[' + unit * (LARGE // len(unit))


LARGE_CASES: dict[str, Callable[[Path], object]] = {
    "flipped data": lambda step: flip(step / DATA, LARGE // 2),
    "cut data": lambda step: os.truncate(step / DATA, LARGE // 2),
    "long data": lambda step: os.truncate(step / DATA, 2**40),
    "flipped side file": lambda step: flip(step / "tokenizer.json", 9),
    "long side file": lambda step: os.truncate(step / "tokenizer.json", 2**40),
    "long manifest": lambda step: os.truncate(step / "manifest.json", 2**40),
    "long part": lambda step: os.truncate(step / "parts/00000.json", 2**40),
    "long COMMIT": lambda step: os.truncate(step / "COMMIT", 2**40),
    "noise as manifest": lambda step: (step / "manifest.json").write_bytes(os.urandom(LARGE)),
    "noise as header": lambda step: _header(step, os.urandom(LARGE)),
    "noise as part": lambda step: (step / "parts/00000.json").write_bytes(os.urandom(LARGE)),
}
CRAFTED_CASES: dict[str, Callable[[Path], object]] = {
    "crafted manifest, dense": lambda step: write_manifest(step, crafted(b"[],")),
    "crafted manifest, deep": lambda step: write_manifest(step, crafted(b"[       ")),
    "crafted part of arrays": lambda step: write_part_data(step, crafted(b"[   ],")),
    "crafted part of objects": lambda step: write_part_data(step, crafted(b"{   },")),
    "crafted part of numbers": lambda step: write_part_data(step, crafted(b"999,")),
    "crafted header of names": lambda step: _plain(step, crafted(b'"12345",')),
    "crafted index": lambda step: _index(step, crafted(b"{   },")),
}


def _header(step: Path, data: bytes) -> None:
    with (step / DATA).open("r+b") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(LARGE + 4096)


def _plain(step: Path, header: bytes) -> None:
    """Makes it a Hugging Face folder with that header."""
    shutil.rmtree(step)
    step.mkdir()
    (step / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _index(step: Path, data: bytes) -> None:
    shutil.rmtree(step)
    step.mkdir()
    (step / "model.safetensors.index.json").write_bytes(data)


def peak(step: Path) -> tuple[int, str]:
    """Bytes by which a process that loads the step grows at most, and the error that it gets."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        error = explain(step)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        os.write(theirs, json.dumps([most - before, error[:300]]).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        most, error = json.loads(answer.read())
    os.waitpid(child, 0)
    return most, error


def main() -> None:
    """Prints for each case, as JSON: its name, bytes beyond those of the good step, bytes of its files, the error."""
    root = Path(sys.argv[1])
    kinds: list[tuple[Path, Mapping[str, Callable[[Path], object]]]]
    kinds = [(make_good(root / "small"), {name: change for name, (change, _) in CASES.items()})]
    kinds.append((make_large(root / "large"), LARGE_CASES | CRAFTED_CASES))
    for good, _ in kinds:
        explain(good)
    for good, cases in kinds:
        usual, error = peak(good)
        assert not error, error
        for name, change in cases.items():
            step = Path(shutil.copytree(good, root / "broken" / good.name))
            change(step)
            size = sum(path.lstat().st_blocks * 512 for path in step.rglob("*") if path.is_file())
            most, error = peak(step)
            print(json.dumps([name, most - usual, size, error]), flush=True)
            shutil.rmtree(root / "broken")


if __name__ == "__main__":
    main()
