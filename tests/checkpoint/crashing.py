"""Small jobs that are interrupted everywhere, and the checks afterwards: shared by the crash tests."""

import errno
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tk.checkpoint import Checkpoint, RunFolder, export_links, reshard
from tk.checkpoint.files import data_files, direct_writer, folders
from tk.checkpoint.format.step_names import step_of
from tk.checkpoint.save.save_job import SaveJob
from tk.core.casts import Array
from tk.core.errors import NotCommitted, StorageError
from tk.core.layout import Layout
from tk.core.ownership import Owned
from tk.core.tensors import Split, TensorSpec, with_slots

SLOTS = {"weight": "F32", "exp_avg": "F32"}
TABLE = with_slots(
    (
        TensorSpec("model.embed_tokens.weight", (7, 4), Split(0, rule="pad")),
        TensorSpec("model.layers.0.mlp.up_proj.weight", (8, 700), Split(0), 0),  # of which a rank has whole pages
        TensorSpec("model.norm.weight", (4,), layer="last"),
    ),
    SLOTS,
)
LAYOUT = Layout(tp=2)
ALLOWED = re.compile(r"step-\d{8}|LOCK|LATEST")

Report = Callable[[int], None]


def act_as_if_large(set_to: Callable[[object, str, object], None] = setattr) -> None:
    """Has pages as few as these tensors have written past the page cache, and files closed and opened again, as those
    of large checkpoints are."""
    set_to(direct_writer, "SMALLEST", direct_writer.PAGE)
    set_to(data_files, "max_open", lambda: 2)


def values_of(step: int) -> Callable[[Owned], Array]:
    """The elements of any item, a function of its names and the step."""

    def values(item: Owned) -> Array:
        boxed = whole_values(step, item.tensor, item.slot)[item.box.slices]
        return np.ascontiguousarray(boxed).reshape(-1)[slice(*(item.flat or (None, None)))]

    return values


@cache
def whole_values(step: int, tensor: str, slot: str) -> Array:
    """A tensor's values at a step; every check of a scenario compares with them, so they are drawn once."""
    shape = next(spec.shape for spec in TABLE if spec.name == tensor)
    rng = np.random.default_rng([zlib.crc32(f"{tensor}/{slot}".encode()), step])
    values = rng.standard_normal(shape, dtype=np.float32)
    values.flags.writeable = False
    return values


def job_of(run: Path, attempt: str, writer: int, keep: int = 2) -> SaveJob:
    """Returns the job of one of two ranks."""
    return SaveJob(run, attempt, writer, TABLE, LAYOUT, side_files={"config.json": b"{}"}, keep=keep)


def save(run: Path, steps: range, report: Report = lambda step: None, keep: int = 2) -> None:
    """Saves steps as a job of two ranks would, in one process; `report` hears of each when it is committed."""
    with RunFolder(run).lock() as locked:
        for step in steps:
            for writer in (1, 0):
                job_of(run, locked.attempt, writer, keep).save(step, {"step": step}, values_of(step))
            report(step)


def assert_is_step(path: Path, step: int) -> None:
    """The folder is a whole checkpoint with the values of that step."""
    found = Checkpoint.open_step(path)
    assert found.step == step
    assert found.verify().ok
    for tensor, slot in found.chunks:
        assert np.array_equal(found.read(tensor, slot=slot).numpy(), whole_values(step, tensor, slot)), (tensor, slot)


@dataclass(frozen=True)
class Scenario:
    """Something that may be interrupted anywhere.

    Attributes:
        prepare: makes the content of a folder before.
        run: the job itself in that folder; reports numbers as they become true for good.
        check: asserts the state of the folder, given the last number reported (0: none).
    """

    prepare: Callable[[Path], None]
    run: Callable[[Path, Report], None]
    check: Callable[[Path, int], None]


def _prepare_run(folder: Path) -> None:
    """One good step, and the leftovers of a killed save and of a killed pruning."""
    run = folder / "run"
    save(run, range(1, 2))
    for name in ("step-00000002.tmp-0000dead", "step-00000000.trash-0000dead"):
        shutil.copytree(run / "step-00000001", run / name)
    (run / "LATEST.tmp-0000dead").write_text("step-0")


def _check_run(folder: Path, reported: int) -> None:
    """No step that can be seen is damaged, the reported one or a newer one loads, and the next start finds its way."""
    run = RunFolder(folder / "run")
    steps = run.steps()
    for step, path in steps:
        assert_is_step(path, step)
    newest = steps[-1][0] if steps else 0
    assert newest >= max(reported, 1), f"step {reported} was reported as committed; the newest is {newest}"
    with run.lock():
        left = {path.name for path in run.path.iterdir() if not ALLOWED.fullmatch(path.name)}
    assert not left, f"not reaped: {left}"
    save(run.path, range(newest + 1, newest + 2))
    found = Checkpoint.open(run.path)
    assert (found.step, found.skipped) == (newest + 1, ())


@contextmanager
def lower_layer() -> Iterator[None]:
    """Steps lie in a lower layer of an overlay: the system refuses to move their folders, and moves their files."""
    real = folders.rename

    def rename(source: Path, target: Path) -> None:
        if step_of(source.name) is not None:
            raise StorageError(f"{source} cannot be moved to {target}: Invalid cross-device link.", errno.EXDEV)
        real(source, target)

    folders.rename = rename
    try:
        yield
    finally:
        folders.rename = real


def _run_prune(folder: Path, report: Report) -> None:
    with lower_layer(), RunFolder(folder / "run").lock() as run:
        run.prune(keep=1)
    report(3)


def _check_prune(folder: Path, _reported: int) -> None:
    """The newest step is whole; each older one is whole or no step; after the next start, all that are there are."""
    run = RunFolder(folder / "run")
    for step, path in run.steps():
        if (path / "COMMIT").exists():
            assert_is_step(path, step)
        else:
            assert step < 3
            with pytest.raises(NotCommitted):
                Checkpoint.open_step(path)
    assert_is_step(folder / "run" / "step-00000003", 3)
    with lower_layer(), run.lock() as locked:
        for step, path in run.steps():
            assert_is_step(path, step)
        locked.prune(keep=1)
    assert [step for step, _ in run.steps()] == [3]


def _prepare_fork(folder: Path) -> None:
    save(folder / "run", range(1, 4), keep=0)


def _run_fork(folder: Path, report: Report) -> None:
    with RunFolder(folder / "run").lock() as run:
        run.fork(1)
    report(1)


def _check_fork(folder: Path, done: int) -> None:
    """Every step is whole, in the run or in the fork; steps in the fork are newer than those in the run."""
    kept = [path for _, path in RunFolder(folder / "run").steps()]
    forked = sorted(folder.glob("run/forked-*/step-*"))
    names = [path.name for path in kept] + [path.name for path in forked if path.name != kept[-1].name]
    assert names == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert len(kept) == 1 or not done
    for path in kept + forked:
        assert_is_step(path, int(path.name[-1]))
    with RunFolder(folder / "run").lock() as run:
        run.fork(1)
    assert len(RunFolder(folder / "run").steps()) == 1
    assert (folder / "run" / "LATEST").read_text() == "step-00000001\n"


def _prepare_target(folder: Path, old: bool) -> None:
    save(folder / "run", range(1, 3))
    if old:
        reshard(folder / "run" / "step-00000001", folder / "target", layout=Layout())


def _check_target(folder: Path, done: int, old: bool, job: Callable[[Path], object]) -> None:
    """The target is not there, or the old one, or the new one, always whole; the source is untouched; leftovers of the
    interrupted job are gone after the next."""
    target = folder / "target"
    if target.exists():
        step = Checkpoint.open_step(target).step
        assert_is_step(target, step)
        assert step == 2 or (old and not done)
    else:
        assert not done
        assert not old
    for step in (1, 2):
        assert_is_step(folder / "run" / f"step-0000000{step}", step)
    job(folder)
    assert {path.name for path in folder.iterdir()} == {"run", "target"}
    assert_is_step(target, 2)


def _reshard(folder: Path) -> object:
    return reshard(folder / "run" / "step-00000002", folder / "target", layout=Layout(tp=4), force=True)


def _export(folder: Path) -> object:
    return export_links(Checkpoint.open(folder / "target"), folder / "export", force=True)


def _target(old: bool) -> Scenario:
    def run(folder: Path, report: Report) -> None:
        _reshard(folder)
        report(1)

    return Scenario(
        lambda folder: _prepare_target(folder, old),
        run,
        lambda folder, done: _check_target(folder, done, old, _reshard),
    )


def _prepare_export(folder: Path) -> None:
    save(folder / "run", range(1, 2))
    reshard(folder / "run" / "step-00000001", folder / "target", layout=Layout())


def _run_export(folder: Path, report: Report) -> None:
    _export(folder)
    report(1)


def _check_export(folder: Path, done: int) -> None:
    assert_is_step(folder / "target", 1)
    assert (folder / "export").exists() or not done
    if (folder / "export").exists():
        assert_is_step(folder / "export", 1)
    _export(folder)
    assert {path.name for path in folder.iterdir()} == {"run", "target", "export"}


SCENARIOS: Mapping[str, Scenario] = {
    "save and prune": Scenario(
        _prepare_run, lambda folder, report: save(folder / "run", range(2, 4), report), _check_run
    ),
    "prune in place": Scenario(_prepare_fork, _run_prune, _check_prune),
    "fork": Scenario(_prepare_fork, _run_fork, _check_fork),
    "reshard to a new folder": _target(old=False),
    "reshard over another": _target(old=True),
    "export by links": Scenario(_prepare_export, _run_export, _check_export),
}
