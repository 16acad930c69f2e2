"""States on disk hold what states in memory hold, through any calls, and say so where the disk fails."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk.checkpoint.files import storage
from tk.core.errors import StorageError
from tk.core.state_pieces import cut
from tk.tests.example_counts import examples
from tk.tests.open_files import open_files_under
from tk.train.zero.states import disk_states
from tk.train.zero.states.disk_states import DiskStates
from tk.train.zero.states.memory_states import MemoryStates

SIZES = [3000, 32, 5000]
SLOTS = {"master": torch.float32, "exp_avg": torch.bfloat16}
DTYPES = [SLOTS, {"momentum": torch.bfloat16, "master": torch.float32}, SLOTS | {"momentum": torch.float32}]
PLACES = [(slot, bucket) for bucket, slots in enumerate(DTYPES) for slot in slots]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1,000 elements."""
    monkeypatch.setattr(disk_states, "cut", lambda sizes, itemsizes: cut(sizes, itemsizes, 1000))


@pytest.fixture
def states(tmp_path: Path) -> Iterator[DiskStates]:
    made = DiskStates(DTYPES, SIZES, tmp_path, 3, pinned=False)
    yield made
    made.close()


def change(store: DiskStates | MemoryStates, buckets: list[int], amount: float) -> None:
    """Changes all values of buckets, each by its place."""
    with store.changing(buckets) as ranges:
        for each in ranges:
            places = torch.arange(each.begin, each.end)
            for slot, values in each.slots.items():
                values.add_((places % 7 * amount).to(values.dtype) + (slot == "master"))


def change_twice(store: DiskStates) -> None:
    for _ in range(2):
        change(store, [2, 1, 0], 1.0)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    name = draw(st.sampled_from(["change", "write", "ahead"]))
    if name == "write":
        slot, bucket = draw(st.sampled_from(PLACES))
        begin = draw(st.integers(0, SIZES[bucket]))
        return name, slot, bucket, begin, draw(st.integers(begin, SIZES[bucket]))
    buckets = draw(st.permutations([0, 1, 2])) if draw(st.booleans()) else [2, 1, 0]
    return name, buckets[: draw(st.integers(1, 3))], draw(st.sampled_from([0.5, 1.0, 3.0]))


@examples(30)
@given(st.lists(calls(), max_size=6))
def test_states_on_disk_hold_what_states_in_memory_hold(
    tmp_path_factory: pytest.TempPathFactory, made: list[Any]
) -> None:
    disk = DiskStates(DTYPES, SIZES, tmp_path_factory.mktemp("states"), 3, pinned=False)
    memory = MemoryStates(DTYPES, SIZES, torch.device("cpu"))
    for name, *arguments in made:
        if name == "ahead":
            disk.read_ahead(arguments[0])
            continue
        for store in (disk, memory):
            if name == "change":
                change(store, *arguments)
            else:
                slot, bucket, begin, end = arguments
                store.write(slot, bucket, begin, torch.arange(begin, end) / 8)
    for slot, bucket in PLACES:
        size = SIZES[bucket]
        for begin, end in ((0, size), (size // 3, size // 2 + 1)):
            assert torch.equal(disk.read(slot, bucket, begin, end), memory.read(slot, bucket, begin, end))
    disk.close()


def test_the_file_has_no_name_and_ends_with_its_store(states: DiskStates, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    assert open_files_under(tmp_path) > 0
    states.close()
    assert open_files_under(tmp_path) == 0


def test_without_files_that_have_no_name_a_name_that_was_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no such files here")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    (tmp_path / ".tk-unnamed-12-34").write_text("of a process that was killed")
    (tmp_path / "notes.txt").write_text("mine")
    made = DiskStates(DTYPES, SIZES, tmp_path, 3, pinned=False)
    change(made, [2, 1, 0], 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert made.read("master", 0, 6, 9).tolist() == [7.0, 1.0, 2.0]
    made.close()


def test_a_pinned_generation_stays_while_updates_and_writes_go_on(states: DiskStates) -> None:
    for number in range(3):
        change(states, [2, 1, 0], 1.0 + number)
        before = {(slot, bucket): states.read(slot, bucket, 0, SIZES[bucket]) for slot, bucket in PLACES}
        assert states.pin()
        kept = {key: states.segments(*key, 0, SIZES[key[1]]) for key in before}
        for amount in (0.5, 3.0):
            change(states, [2, 1, 0], amount)
        states.write("master", 0, 1500, torch.full((700,), 9.0))
        states.write("exp_avg", 2, 10, torch.full((5,), 2.0))
        after = states.read("master", 0, 0, SIZES[0])
        assert (after[1500:2200] == 9.0).all()
        assert torch.equal(after[:1500], before["master", 0][:1500] + 2 + torch.arange(1500) % 7 * 3.5)
        for (slot, bucket), places in kept.items():
            found = b"".join(os.pread(states.fd, nbytes, begin) for begin, nbytes in places)
            assert torch.equal(torch.frombuffer(bytearray(found), dtype=DTYPES[bucket][slot]), before[slot, bucket])
        states.unpin()


def test_without_place_for_two_generations_nothing_is_pinned(
    states: DiskStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(states, [2, 1, 0], 1.0)
    for number, result in ((errno.ENOSPC, False), (errno.EDQUOT, False)):
        monkeypatch.setattr(os, "posix_fallocate", refusing(number))
        assert states.pin() is result
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.EIO))
    with pytest.raises(StorageError, match="Input/output error"):
        states.pin()
    change(states, [2, 1, 0], 1.0)
    assert states.read("exp_avg", 0, 6, 8).tolist() == [12.0, 0.0]


def refusing(number: int) -> Callable[..., None]:
    def call(fd: int, offset: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    return call


def failing(name: str, number: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has an operation of storage fail from the call after `after` others on; errno 0 is a read that ends early."""
    real: Callable[..., Any] = getattr(storage, name)
    left = [after]

    def fail(fd: int, data: Any, offset: int, *more: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return real(fd, data, offset, *more, **options)
        if number:
            raise StorageError(f"a test's disk fails: {os.strerror(number)}", number)
        return 0

    monkeypatch.setattr(storage, name, fail)


@pytest.mark.parametrize("after", [0, 1, 5, 8])
@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("pread", errno.EIO, "a test's disk fails: Input/output error"),
        ("pread", 0, r"optimizer states in .* ends at byte"),
        ("pwrite", errno.ENOSPC, "a test's disk fails: No space left"),
        ("pwrite", errno.EIO, "a test's disk fails: Input/output error"),
    ],
)
def test_a_disk_that_fails_is_reported_by_the_next_update_at_the_latest(
    states: DiskStates, name: str, number: int, after: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(states, [2, 1, 0], 1.0)
    states.read("master", 0, 0, 1)  # waits for its writes
    failing(name, number, after, monkeypatch)
    with pytest.raises(StorageError, match=message):
        change_twice(states)
    states.close()


def test_a_disk_that_is_too_small_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"cannot be given \d+ bytes: No space left"):
        DiskStates(DTYPES, SIZES, tmp_path, 3, pinned=False)
    assert list(tmp_path.iterdir()) == []
