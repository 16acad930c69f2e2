"""Parts and their chunks: the values that a part may have, and the checksums of a chunk."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.format import chunk
from tk.checkpoint.format.chunk import BlockCrcs, Chunk, DataFile, Part
from tk.core.errors import ManifestError, ShardCorrupt
from tk.core.geometry import Box
from tk.scripts.broken_checkpoints import rewrite_part

Document = dict[str, Any]


def chunk0(**change: object) -> Callable[[Document], None]:
    return lambda part: part["chunks"][0].update(change)


def swap_boxes(part: Document) -> None:
    """Two chunks of one tensor claim the same elements."""
    first = next(c for c in part["chunks"] if c["tensor"].endswith("down_proj.weight"))
    first["box"] = [[0, 32], [24, 48]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (chunk0(file="../../etc/passwd"), "not a plain file name"),
        (chunk0(file="other.safetensors"), "outside the part's files"),
        (chunk0(offset=10**9), "outside the part's files"),
        (chunk0(offset=-1), "offset must be an integer"),
        (chunk0(offset=True), "offset must be an integer"),
        (chunk0(offset=4096.0), "offset must be an integer"),
        (chunk0(nbytes=2**61), "crc must be an array"),
        (chunk0(box=[[0, 2**40]] * 2), "lies outside shape"),
        (chunk0(box=[[5, 1]]), "box must be an integer from 5"),
        (chunk0(box=[[0, 1]] * 9, flat=[0, 1]), "at most 8 dims"),
        (chunk0(flat=[0, 10**6]), "is no run"),
        (chunk0(tensor="unknown"), "does not list for it"),
        (chunk0(slot="exp_avg_cubed"), "unknown to the manifest"),
        (chunk0(crc=[]), "crc must be an array of 1"),
        (chunk0(note="x"), "unknown key 'note'"),
        (lambda part: part["chunks"].pop(), "exactly once"),
        (lambda part: part["chunks"].append(part["chunks"][0]), "overlap in"),
        (swap_boxes, "exactly once"),
        (lambda part: part["files"]["model-00000.safetensors"].update(size=10**12), "bytes; 1000000000000 were"),
    ],
)
def test_hostile_parts(step: Path, change: Callable[[Document], None], message: str) -> None:
    rewrite_part(step, change)
    with pytest.raises((ManifestError, ShardCorrupt), match=message):
        Checkpoint.open_step(step)


def test_two_parts_that_list_one_file(step: Path) -> None:
    first = json.loads((step / "parts" / "00000.json").read_text())
    rewrite_part(step, lambda part: part.update(files=first["files"], chunks=[]), "00001.json")
    with pytest.raises(ManifestError, match=r"is in the parts of writers 0 and 1"):
        Checkpoint.open_step(step)


def test_a_part_comes_back_from_its_bytes() -> None:
    box = Box.from_bounds([[0, 2], [4, 8]])
    whole = Chunk("a", "weight", box, None, "f", 4096, 32, (1,))
    chunks = (whole, Chunk("a", "exp_avg", box, (2, 5), "f", 8192, 12, (2,)))
    part = Part(3, {"f": DataFile(8204, "ab" * 32)}, chunks)
    assert Part.parse(part.to_bytes(), "the part") == part
    assert [(each.start, each.stop) for each in chunks] == [(0, 8), (2, 5)]


def test_checksums_are_of_blocks_however_the_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "BLOCK", 100)
    data = bytes(range(256))
    crcs = BlockCrcs()
    for low, high in ((0, 30), (30, 30), (30, 230), (230, 256)):
        crcs.update(memoryview(data)[low:high])
    assert crcs.finish() == tuple(zlib.crc32(data[low : low + 100]) for low in (0, 100, 200))
    assert BlockCrcs().finish() == ()
