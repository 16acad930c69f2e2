"""Heartbeats: on a shared file system a rank writes rarely, but always the phase in which it stays."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.train.health.heartbeat import Beat, Heartbeat, read_beats

DEADLINE = 60.0


def _count_writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    writes: list[bytes] = []
    pwrite = os.pwrite

    def counted(file: int, data: bytes, offset: int) -> int:
        writes.append(data)
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    return writes


def _wait_for(folder: Path, is_right: Callable[[Beat], bool]) -> Beat:
    deadline = time.monotonic() + DEADLINE
    while not is_right(beat := read_beats(folder, 1)[0]):
        assert time.monotonic() < deadline, beat
    return beat


def test_without_an_interval_every_phase_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writes = _count_writes(monkeypatch)
    heartbeat = Heartbeat(tmp_path)
    for step in range(1, 4):
        heartbeat.beat("forward", step)
        assert read_beats(tmp_path, 1)[0].place == f"at step {step} in forward"
    assert len(writes) == 4


def test_phases_within_the_interval_are_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writes = _count_writes(monkeypatch)
    heartbeat = Heartbeat(tmp_path, interval=3600.0)
    for step in range(1, 1000):
        heartbeat.beat("forward", step)
        heartbeat.beat("reduce")
    assert len(writes) == 1, "only the first beat"
    heartbeat.give_up()
    (beat,) = read_beats(tmp_path, 1)
    assert (beat.place, beat.gave_up, len(writes)) == ("at step 999 in reduce", True, 2)


def test_the_phase_in_which_a_rank_stays_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stuck rank calls the heartbeat no more."""
    writes = _count_writes(monkeypatch)
    heartbeat = Heartbeat(tmp_path, interval=0.2)
    begun = time.time()
    for step in range(1, 100):
        heartbeat.beat("forward", step)
    heartbeat.beat("reduce")
    beat = _wait_for(tmp_path, lambda beat: beat.place == "at step 99 in reduce")
    assert begun <= beat.since <= time.time()
    assert len(writes) <= 2 + (time.time() - begun) / 0.2
    heartbeat.beat("optimizer")
    _wait_for(tmp_path, lambda beat: beat.phase == "optimizer")


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beats", 2)
    heartbeat.beat("forward of micro-batch 3 on stage 1", 41)
    heartbeat.beat("x" * 200)
    heartbeat.give_up()
    beats = read_beats(tmp_path / "beats", 4)
    assert [beat.place for beat in beats] == ["still starting"] * 2 + [f"at step 41 in {'x' * 96}", "still starting"]
    assert [beat.gave_up for beat in beats] == [False, False, True, False]
