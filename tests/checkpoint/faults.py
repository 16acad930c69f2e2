"""Faults at each operation of a save: the process is killed, the disk is full, the power is cut.

All checkpoint I/O goes through the modules of `checkpoint/files` in MODULES; their operations are replaced here, one by
one, by ones that are counted, that fail, or that are remembered together with the data that a disk would have kept.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tk.checkpoint.files import disk_facts, folders, locks, lookup, small_files, storage

MODULES = (storage, folders, lookup, small_files, disk_facts)
# The operations that change a disk, and those that only look or are made of these. A test holds that every function is
# in one of the lists.
CHANGES = (
    "open_new", "open_again", "pwrite", "fsync", "fsync_dir", "rename", "exchange", "link", "make_dir", "remove_file",
    "remove_dir",
)  # fmt: skip
LOOKS = (
    "open_read", "close", "closing", "file_size", "file_state", "state_of", "pread", "list_names", "reading",
    "read_exact", "read_small", "_preadv", "free_bytes", "set_direct", "may_write", "identity", "mounts_beneath",
    "exists", "is_dir", "is_link", "_status", "find", "_is_absent", "_closing_on_error", "_not_regular",
    "open_unnamed", "open_direct", "reserve", "_unlink",
)  # fmt: skip
MADE_OF_CHANGES = ("make_dirs", "remove_tree", "swap", "write_small", "place_small", "replace_small")

Operation: TypeAlias = Callable[..., Any]


@contextmanager
def watched(watch: Callable[..., Any], names: tuple[str, ...] = CHANGES) -> Iterator[None]:
    """Has every operation go through `watch(name, operation, *arguments)`."""
    real = {name: (module, getattr(module, name)) for module in MODULES for name in names if hasattr(module, name)}
    assert real.keys() == set(names)
    for name, (module, operation) in real.items():
        setattr(module, name, partial(watch, name, operation))
    try:
        yield
    finally:
        for name, (module, operation) in real.items():
            setattr(module, name, operation)


class AtOperation:
    """A watch that does something else than operation number `index`; of a write, half is done first."""

    def __init__(self, index: int, instead: Callable[[], Any]) -> None:
        self.left = index
        self.instead = instead

    def __call__(self, name: str, operation: Operation, *arguments: Any) -> Any:
        self.left -= 1
        if self.left != -1:
            return operation(*arguments)
        if name == "pwrite":
            fd, data, offset = arguments
            operation(fd, data[: len(data) // 2], offset)
        return self.instead()

    @property
    def reached(self) -> bool:
        """Whether there was such an operation."""
        return self.left < 0


class FailingSystem:
    """Stands for modules of Python's library beneath checkpoint/files: call number `index` to the system fails.

    Args:
        number: the errno of that call and, if `lasting`, of all after it.
    """

    def __init__(self, index: int, number: int, lasting: bool = False) -> None:
        self.left = index
        self.number = number
        self.lasting = lasting
        self.failed = ""

    def calls(self, name: str, call: Operation) -> Operation:
        """The call, which may fail in its place."""

        def made(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == -1 or (self.lasting and self.left < 0):
                self.failed = name
                raise OSError(self.number, os.strerror(self.number))
            return call(*arguments, **options)

        return made

    @contextmanager
    def beneath_storage(self) -> Iterator[None]:
        """Has checkpoint/files call this system; closing a descriptor never fails."""
        modules, names = (*MODULES, locks), ("os", "fcntl")
        places = [
            (module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)
        ]
        for module, name, real in places:
            setattr(module, name, _Stand(real, self))
        try:
            yield
        finally:
            for module, name, real in places:
                setattr(module, name, real)


class _Stand:
    def __init__(self, module: Any, system: FailingSystem) -> None:
        self._module, self._system = module, system

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        plain = name in ("close", "strerror", "fsencode", "fcntl") or not callable(real)
        return real if plain else self._system.calls(name, real)


@dataclass
class File:
    """A file's contents since it was last durable: [0] surely survives, [-1] is the one that a reader sees."""

    states: list[bytes]


@dataclass
class Folder:
    """A folder's entries since it was last durable, as File has its contents."""

    states: list[dict[str, "File | Folder"]]

    def change(self, **entries: "File | Folder | None") -> None:
        """Adds a state with some names set or, if None, gone."""
        changed = self.states[-1] | entries
        self.states.append({name: node for name, node in changed.items() if node is not None})


Survives: TypeAlias = Literal["only synced data", "all names", "anything", "everything"]


class Disk:
    """A disk beneath `root`, which remembers the operations that pass by and can be cut off after each.

    Renames within a folder are atomic, as on every journalling file system. Data that was not fsynced, a file's content
    and a folder's entries separately, may survive or not.

    Args:
        lies: which operations are reported as done and are not.
    """

    def __init__(
        self, root: Path, lies: Callable[[str, tuple[Any, ...]], bool] = lambda name, arguments: False
    ) -> None:
        self.base = root
        self.lies = lies
        self.root = _read_tree(root)
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self._files: dict[int, File] = {}

    def __call__(self, name: str, operation: Operation, *arguments: Any) -> Any:
        """The watch: carries out and remembers."""
        result = operation(*arguments)
        if name == "pwrite":
            arguments = (arguments[0], bytes(arguments[1]), arguments[2])
        self.log.append((name, (*arguments, result) if name in ("open_new", "open_again") else arguments))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operations inside are carried out for real and remembered."""
        with watched(self, (*CHANGES, "close")):
            yield

    def replay(self) -> Iterator[None]:
        """Carries the remembered operations out on the model, one by one."""
        for name, arguments in self.log:
            if not self.lies(name, arguments):
                getattr(self, f"_{name}")(*arguments)
            yield

    def write_to(self, target: Path, survives: Survives, rng: random.Random) -> None:
        """Fills `target` with the state of `root` after a power cut now."""
        target.mkdir()
        _write_tree(self.root, target, survives, rng)

    def _folder(self, path: Path) -> Folder:
        node: File | Folder = self.root
        for name in path.relative_to(self.base).parts:
            assert isinstance(node, Folder)
            node = node.states[-1][name]
        assert isinstance(node, Folder)
        return node

    def _node(self, path: Path) -> "File | Folder":
        return self._folder(path.parent).states[-1][path.name]

    def _open_new(self, path: Path, fd: int) -> None:
        self._files[fd] = File([b""])
        self._folder(path.parent).change(**{path.name: self._files[fd]})

    def _open_again(self, path: Path, fd: int) -> None:
        node = self._node(path)
        assert isinstance(node, File)
        self._files[fd] = node

    def _close(self, fd: int) -> None:
        self._files.pop(fd, None)

    def _pwrite(self, fd: int, data: bytes, offset: int) -> None:
        if fd in self._files:  # the lock's note is not: nothing depends on it
            content = self._files[fd].states[-1].ljust(offset, b"\0")
            self._files[fd].states.append(content[:offset] + data + content[offset + len(data) :])

    def _fsync(self, fd: int) -> None:
        del self._files[fd].states[:-1]

    def _fsync_dir(self, path: Path) -> None:
        del self._folder(path).states[:-1]

    def _rename(self, source: Path, target: Path) -> None:
        node = self._node(source)
        if source.parent == target.parent:
            self._folder(source.parent).change(**{source.name: None, target.name: node})
        else:
            self._folder(target.parent).change(**{target.name: node})
            self._folder(source.parent).change(**{source.name: None})

    def _exchange(self, one: Path, two: Path) -> None:
        self._folder(one.parent).change(**{one.name: self._node(two), two.name: self._node(one)})

    def _link(self, source: Path, target: Path) -> None:
        self._folder(target.parent).change(**{target.name: self._node(source)})

    def _make_dir(self, path: Path) -> None:
        if path.name not in self._folder(path.parent).states[-1]:
            self._folder(path.parent).change(**{path.name: Folder([{}])})

    def _remove_file(self, path: Path) -> None:
        self._folder(path.parent).change(**{path.name: None})

    _remove_dir = _remove_file


def _read_tree(path: Path) -> Folder:
    return Folder([{p.name: _read_tree(p) if p.is_dir() else File([p.read_bytes()]) for p in path.iterdir()}])


def _write_tree(folder: Folder, path: Path, survives: Survives, rng: random.Random) -> None:
    synced, latest = folder.states[0], folder.states[-1]
    entries = rng.choice(folder.states) if survives == "anything" else synced
    if survives in ("all names", "everything"):
        entries = latest
    for name, node in entries.items():
        if isinstance(node, Folder):
            (path / name).mkdir()
            _write_tree(node, path / name, survives, rng)
        else:
            content = rng.choice(node.states) if survives == "anything" else node.states[0]
            (path / name).write_bytes(node.states[-1] if survives == "everything" else content)


def kill() -> None:
    """SIGKILL to this process."""
    os.kill(os.getpid(), 9)
