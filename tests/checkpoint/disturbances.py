"""What other programs do to a source between the calls of an operation, and the operations that it is done to."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tk.checkpoint import Checkpoint, Options, compare, prepare_export, prepare_reshard
from tk.checkpoint.read.read_plan import ReadRequest
from tk.checkpoint.read.shared_read import read_all
from tk.core.errors import TkError
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.tests.checkpoint.faults import watched

SHARDS = {"model-1.safetensors": ("a", "b"), "model-2.safetensors": ("c", "d")}
SHAPE = (64, 64)
LONG_AGO = 10**18  # ns

Values = dict[str, set[float]]


def make_model(folder: Path, value: float) -> Path:
    """A Hugging Face folder of two shards, whose every number, and a word of whose side files, is one value."""
    folder.mkdir(parents=True)
    for file, names in SHARDS.items():
        save_file({name: np.full(SHAPE, value, np.float32) for name in names}, folder / file)
    weight_map = ", ".join(f'"{name}": "{file}"' for file, names in SHARDS.items() for name in names)
    (folder / "model.safetensors.index.json").write_text(
        f'{{"metadata": {{"of": {value}}}, "weight_map": {{{weight_map}}}}}'
    )
    (folder / "config.json").write_text(f'{{"model_type": "mine", "of": {value}}}')
    (folder / "tokenizer.json").write_text(f'{{"of": {value}}}')
    for path in folder.iterdir():
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return folder


def values_in(folder: Path) -> Values:
    """The values of each tensor, and the word in each side file."""
    arrays = {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}
    texts = {name: (folder / name).read_text() for name in ("config.json", "tokenizer.json")}
    words = {name: {float(text.rpartition(":")[2].strip(" }\n"))} for name, text in texts.items()}
    return {name: set(np.unique(array).tolist()) for name, array in arrays.items()} | words


def overwrite(source: Path, new: Path) -> None:
    """Writes each file anew in place, as `cp` and most programs do."""
    for path in new.iterdir():
        with (source / path.name).open("r+b") as file:
            file.write(path.read_bytes())
            file.truncate()


def overwrite_and_set_times_back(source: Path, new: Path) -> None:
    """As `rsync --inplace --times` does."""
    overwrite(source, new)
    for path in source.iterdir():
        os.utime(path, ns=(LONG_AGO, LONG_AGO))


def replace_files(source: Path, new: Path) -> None:
    """Renames new files over the old ones, as rsync and careful programs do."""
    for path in new.iterdir():
        shutil.copyfile(path, source / f"{path.name}.part")
        os.replace(source / f"{path.name}.part", source / path.name)


def swap_folders(source: Path, new: Path) -> None:
    """Moves the folder away and another one to its place."""
    source.rename(source.with_name("away"))
    shutil.copytree(new, source)


def swap_link(source: Path, new: Path) -> None:
    """Puts a link to another folder in the folder's place."""
    source.rename(source.with_name("away"))
    source.symlink_to(new)


def truncate(source: Path, _new: Path) -> None:
    """Empties a shard, as a program does that opens it for writing."""
    os.truncate(source / "model-2.safetensors", 100)


def delete(source: Path, _new: Path) -> None:
    """Removes the files."""
    for path in source.iterdir():
        path.unlink()


def overwrite_last_shard(source: Path, new: Path) -> None:
    """Writes only the last shard anew."""
    (source / "model-2.safetensors").write_bytes((new / "model-2.safetensors").read_bytes())


def overwrite_side_files(source: Path, new: Path) -> None:
    """Writes only config and tokenizer anew."""
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_bytes((new / name).read_bytes())


Disturbance = Callable[[Path, Path], None]
DISTURBANCES: tuple[Disturbance, ...] = (
    overwrite, overwrite_and_set_times_back, overwrite_last_shard, overwrite_side_files, replace_files, swap_folders,
    swap_link, truncate, delete,
)  # fmt: skip


def _export(source: Path, target: Path) -> Values:
    prepare_export(Checkpoint.open(source), target, plain=True).run()
    return values_in(target)


def _reshard(source: Path, target: Path) -> Values:
    prepare_reshard(Checkpoint.open(source), target, Options(Layout())).run()
    assert Checkpoint.open(target).verify().ok
    return values_in(target)


def _load(source: Path, _target: Path) -> Values:
    """As training and serving do."""
    checkpoint = Checkpoint.open(source)
    found: Values = {"config.json": {float(str(checkpoint.config()["of"]))}}
    names = list(checkpoint.tensors)
    requests = [ReadRequest(name, Box.whole(SHAPE)) for name in names]
    read_all(checkpoint, requests, lambda at, read: found.update({names[at]: set(np.unique(read.numpy()).tolist())}))
    return found


def _diff(source: Path, _target: Path) -> Values:
    """The values that the source has by a comparison with a copy of the old one."""
    found = compare(Checkpoint.open(source), Checkpoint.open(source.with_name("copy")))
    differ = {difference.tensor: difference.num_different for difference in found.differences}
    kinds = {0: {1.0}, SHAPE[0] * SHAPE[1]: {2.0}}
    return {name: kinds.get(differ.get(name, 0), {1.0, 2.0}) for names in SHARDS.values() for name in names}


OPERATIONS: Mapping[str, Callable[[Path, Path], Values]] = {
    "export": _export, "reshard": _reshard, "load": _load, "diff": _diff,
}  # fmt: skip


@contextmanager
def disturbed(at: int, disturb: Callable[[], None]) -> Iterator[list[int]]:
    """Has something happen before the operation's call number `at` of those that read; yields the calls made."""
    made = [0]

    def watch(_name: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        made[0] += 1
        if made[0] == at + 1:
            disturb()
        return operation(*arguments, **options)

    with watched(watch, ("open_read", "pread", "list_names", "link")):
        yield made


def outcome(work: Callable[[], Values]) -> Values | TkError:
    """What an operation ends with: the values, or its refusal."""
    try:
        return work()
    except TkError as error:
        return error


def at_every_call(
    place: Path, operation: str, disturbance: Disturbance, stride: int
) -> Iterator[tuple[Values | TkError, Path]]:
    """Disturbs an operation before each `stride`-th call; yields how it ended and its folder."""
    at = 0
    while True:
        now = place / f"{at}"
        source, new = make_model(now / "source", 1.0), make_model(now / "new", 2.0)
        make_model(now / "copy", 1.0)
        with disturbed(at, partial(disturbance, source, new)) as made:
            ended = outcome(partial(OPERATIONS[operation], source, now / "target"))
        if made[0] <= at:
            return
        yield ended, now
        shutil.rmtree(now)
        at += stride
