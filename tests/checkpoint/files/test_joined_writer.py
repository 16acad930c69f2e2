"""Joined writes hold every byte, in few calls, however the writes of several files alternate."""

import os
import random
from pathlib import Path

from tk.checkpoint.files.direct_writer import DirectWriter
from tk.checkpoint.files.joined_writer import LARGE, MOST, JoinedWriter
from tk.tests.checkpoint.faults import watched


def test_any_order_of_files_and_sizes(tmp_path: Path) -> None:
    rng = random.Random(0)
    names = ["a", "b", "c"]
    fds = {name: os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in names}
    wanted = {name: bytearray() for name in names}
    writer = JoinedWriter(DirectWriter(), fds.__getitem__)
    for _ in range(400):
        name, size = rng.choice(names), rng.choice([0, 1, 100, LARGE - 1, LARGE, 3 * LARGE])
        if rng.random() < 0.05:
            wanted[name] += bytes(50)  # a hole
        data = rng.randbytes(size)
        writer.put(name, memoryview(data), len(wanted[name]))
        wanted[name] += data
    writer.flush()
    for name, fd in fds.items():
        assert (tmp_path / name).read_bytes() == wanted[name]
        os.close(fd)


def test_small_runs_of_a_file_become_one_write(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR)
    writer = JoinedWriter(DirectWriter(), lambda _: fd)
    made = []

    def count(_name: str, operation: object, *arguments: object) -> object:
        made.append(arguments)
        assert callable(operation)
        return operation(*arguments)

    with watched(count, ("pwrite",)):
        for at in range(0, MOST - 64, 64):
            writer.put("a", memoryview(bytes(64)), at)
        assert made == []
        writer.flush()
        writer.flush()
    assert len(made) <= 3, "the pages, and what is before and after them"
    assert os.fstat(fd).st_size == MOST - 64
    os.close(fd)
