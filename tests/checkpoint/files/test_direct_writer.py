"""Past the page cache: files hold what was written, whatever the place and size; errors are raised; fallbacks work."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.checkpoint.files import storage
from tk.checkpoint.files.direct_writer import LARGEST, PAGE, SMALLEST, DirectWriter
from tk.tests.checkpoint.faults import Operation, watched
from tk.tests.example_counts import examples

CONTENT = np.random.default_rng(0).integers(0, 256, 3 * LARGEST, np.uint8).data

AWKWARD = st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, SMALLEST, SMALLEST + 1, LARGEST - 1, LARGEST + PAGE])


class Writes:
    """Counts the bytes written directly and through the cache; direct writes get the error `refuse`, if any."""

    def __init__(self, refuse: int = 0) -> None:
        self.refuse = refuse
        self.direct = self.cached = 0
        self._is_direct = False

    def __call__(self, name: str, operation: Operation, *arguments: Any) -> Any:
        if name == "set_direct":
            self._is_direct = operation(*arguments) and arguments[1]
            return self._is_direct
        if self._is_direct and self.refuse:
            raise OSError(self.refuse, os.strerror(self.refuse))
        if self._is_direct:
            self.direct += len(arguments[1])
        else:
            self.cached += len(arguments[1])
        return operation(*arguments)


def write(path: Path, runs: list[int], watch: Writes) -> int:
    """Writes CONTENT in runs of those sizes, one after the other; how many bytes."""
    disk, at = DirectWriter(), 0
    path.unlink(missing_ok=True)
    fd = storage.open_new(path)
    try:
        with watched(watch, ("set_direct", "pwrite")):
            for size in runs:
                run = CONTENT[at : at + size]
                disk.pwrite(fd, run, at)
                at += len(run)
            storage.fsync(fd)
    finally:
        storage.close(fd)
    return at


@examples(60)
@given(st.lists(st.one_of(AWKWARD, st.integers(0, 2 * SMALLEST)), max_size=8))
def test_the_file_holds_any_runs_that_were_written(tmp_path_factory: pytest.TempPathFactory, runs: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "file"
    writes = Writes()
    size = write(path, runs, writes)
    assert path.read_bytes() == CONTENT[:size]
    assert writes.direct + writes.cached == size


def test_whole_pages_pass_the_cache_by(tmp_path: Path) -> None:
    writes = Writes()
    size = write(tmp_path / "file", [100, 2 * LARGEST], writes)
    if not writes.direct:
        pytest.skip(f"{tmp_path} is on a file system without direct writes")
    assert writes.cached < 100 + 2 * PAGE
    assert (tmp_path / "file").read_bytes() == CONTENT[:size]


def test_a_file_system_that_takes_no_direct_writes_gets_them_through_the_cache(tmp_path: Path) -> None:
    writes = Writes(refuse=errno.EINVAL)
    size = write(tmp_path / "file", [5, LARGEST + PAGE, SMALLEST + 7], writes)
    assert (tmp_path / "file").read_bytes() == CONTENT[:size]
    assert writes.direct == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_other_errors_are_raised(tmp_path: Path, number: int) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write(tmp_path / "file", [LARGEST], Writes(refuse=number))
    assert caught.value.errno == number
