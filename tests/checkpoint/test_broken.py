"""Broken and hostile checkpoints: each gets a clear error, on opening, on reading and from verify."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.checkpoint import Checkpoint, reshard
from tk.checkpoint.format import json_strict as strict
from tk.checkpoint.format.chunk import BLOCK
from tk.checkpoint.format.safetensors_file import read_header
from tk.core.errors import CheckpointError, ManifestError, NotCommitted, ShapeMismatch, ShardCorrupt, ShardMissing
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.tensors import Split, TensorSpec
from tk.scripts.broken_checkpoints import flip, rewrite_manifest, rewrite_part
from tk.tests.checkpoint.saving import STATES, llama_table, save_step

Document = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = llama_table(layers=2)
    run = tmp_path_factory.mktemp("good") / "run"
    return save_step(run, table, Layout(tp=2, dp=2, zero=1), STATES, side_files={"config.json": b"{}"})


@pytest.fixture
def step(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run" / good.name))


def test_damage_is_named_and_refused_on_every_way_out(step: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = Checkpoint.open_step(step)
    chunk = checkpoint.chunks[name, "exp_avg"][1]
    flip(step / chunk.file, chunk.offset + chunk.nbytes - 1)
    (problem,) = checkpoint.verify().problems
    assert (problem.tensor, problem.slot, problem.file, problem.block) == (name, "exp_avg", chunk.file, 0)
    with pytest.raises(ShardCorrupt, match=f"{chunk.file}: block 0 of {name}, slot exp_avg"):
        checkpoint.read(name, slot="exp_avg")
    with pytest.raises(ShardCorrupt, match=name):
        reshard(step, tmp_path / "new", layout=Layout())
    assert sorted(os.listdir(tmp_path)) == ["run"]
    checkpoint.read(name)
    reshard(step, tmp_path / "new", layout=Layout(), weights_only=True)


def test_a_large_tensor_is_checked_by_blocks(tmp_path: Path) -> None:
    """Two blocks a rank: tiles and blocks do not line up with one another; column reads check them too."""
    table = (TensorSpec("a", (1600, 7000), Split(1, 2), 0), TensorSpec("b", (4_500_001,), None, 0))
    saved = save_step(tmp_path / "run", table, Layout(tp=2), {"weight": "F32"})
    checkpoint = Checkpoint.open(saved)
    whole = checkpoint.read("a").numpy()
    box = Box((1000, 3000), (500, 2000))
    assert np.array_equal(checkpoint.read("a", box).numpy(), whole[box.slices])
    again = Checkpoint.open(reshard(saved, tmp_path / "tp4", layout=Layout(tp=4)))
    assert np.array_equal(again.read("a").numpy(), whole)
    assert again.verify().ok
    chunk = checkpoint.chunks["a", "weight"][1]
    assert len(chunk.crc or ()) == 2
    flip(saved / chunk.file, chunk.offset + BLOCK + 5)
    assert [(p.tensor, p.block) for p in checkpoint.verify().problems] == [("a", 1)]
    checkpoint.read("a", Box((0, 3500), (100, 3500)))
    for part in (None, Box((1300, 3600), (1, 1))):
        with pytest.raises(ShardCorrupt, match="block 1 of a"):
            checkpoint.read("a", part)
    with pytest.raises(ShardCorrupt, match="block 1 of a"):
        reshard(saved, tmp_path / "tp1", layout=Layout())


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", "parts/00001.json", "model-00000.safetensors"])
def test_a_missing_file(step: Path, name: str) -> None:
    (step / name).unlink()
    with pytest.raises((ShardMissing, NotCommitted), match=name.split("/")[-1]):
        Checkpoint.open_step(step)


def test_a_link_in_place_of_a_shard(step: Path) -> None:
    path = step / "model-00000.safetensors"
    path.rename(step / "elsewhere")
    path.symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match=r"model-00000.safetensors is a link to .*elsewhere, outside the hub"):
        Checkpoint.open_step(step)


def chunk0(**change: object) -> Callable[[Document], None]:
    return lambda part: part["chunks"][0].update(change)


def swap_boxes(part: Document) -> None:
    """Two chunks of one tensor claim the same elements."""
    chunk = next(c for c in part["chunks"] if c["tensor"].endswith("down_proj.weight"))
    chunk["box"] = [[0, 32], [24, 48]]


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "this tk reads 'tk', version 1"),
        (lambda m: m.update(format="pt"), "this tk reads 'tk'"),
        (lambda m: m.update(step=-1), "step must be an integer"),
        (lambda m: m.pop("layout"), "lacks 'layout'"),
        (lambda m: m["layout"].update(tp=0), "tp = 0"),
        (lambda m: m["layout"].update(tp="2"), "tp must be an integer"),
        (lambda m: m["parts"].update({"../x.json": m["parts"]["00000.json"]}), "not a plain file name"),
        (lambda m: m["files"].update({".bashrc": m["files"]["config.json"]}), "not a plain file name"),
        (lambda m: m["files"].update({"gone.json": m["files"]["config.json"]}), None),
        (lambda m: m["tensors"]["model.norm.weight"].update(shape=[2**70]), "shape must be an integer"),
        (lambda m: m["tensors"]["model.norm.weight"].update(shape=[2**40, 2**40]), "is refused"),
        (lambda m: m["tensors"]["model.norm.weight"].update(shape=[31]), "model.norm.weight"),
        (lambda m: m["tensors"]["model.norm.weight"].update(layer=1.5), "layer must be an integer"),
        (lambda m: m["tensors"]["model.norm.weight"]["slots"].update(weight="F33"), "Unknown dtype 'F33'"),
        (lambda m: m["tensors"]["model.norm.weight"]["slots"].update(weight="BF16"), "take 64|elements"),
        (lambda m: m["tensors"]["model.norm.weight"]["slots"].pop("weight"), "no slot 'weight'"),
        (
            lambda m: m["tensors"]["model.norm.weight"].update(
                split={"dim": 1, "unit": 1, "rule": "pad", "of": "", "sections": 1}
            ),
            "dim",
        ),
        (
            lambda m: m["tensors"]["model.norm.weight"].update(
                split={"dim": 0, "unit": 5, "rule": "pad", "of": "", "sections": 1}
            ),
            "cut",
        ),
        (lambda m: m["tensors"].update({"a\nb": m["tensors"]["model.norm.weight"]}), "printable string"),
        (lambda m: m["aliases"].update({"lm_head.weight": "nowhere"}), "name one"),
        (lambda m: m["param_groups"].append({"params": ["nowhere"]}), "is no tensor"),
    ],
)
def test_hostile_manifests(step: Path, change: Callable[[Document], None], message: str | None) -> None:
    rewrite_manifest(step, change)
    if message is None:
        assert [problem.file for problem in Checkpoint.open_step(step).verify().problems] == ["gone.json"]
        return
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open_step(step)


def test_a_manifest_that_commit_does_not_know(step: Path) -> None:
    flip(step / "manifest.json", 30)
    with pytest.raises(NotCommitted, match="does not match COMMIT"):
        Checkpoint.open_step(step)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":1,"a":2}', "'a' twice"),
        (b"[       " * 20_000, "nested deeper"),
        (b"[" + b"0," * 50_000 + b"0]", "holds 50001 values in 100003 bytes; 3 bytes each are the least"),
        (b"[" + b'"ab",' * 50_000 + b"0]", "holds 50000 strings in 250003 bytes; 8 bytes each are the least"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested deeper than 32"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":1e999}', "beyond the range"),
        (b'{"a":' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"a":\xff}', "not UTF-8"),
        (b'{"a":1', "is not JSON"),
        (b"", "is not JSON"),
        (b"[" + b"1," * 50 + b"1]", "more than 50 values"),
    ],
)
def test_hostile_json(text: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        strict.parse(text, "the file", max_nodes=50 if b"1,1" in text else strict.MAX_NODES)


def header(document: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int = 0, end: int = 4, dtype: str = "F32", shape: object = (1,)) -> Document:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x01", "8 at least"),
        (header({}, length=2**63), "claims 9223372036854775808 bytes"),
        (header({}, length=3), "claims 3 bytes"),
        (header(b"[]"), "not a JSON object"),
        (header(b'{"a":1,"a":1}'), "twice"),
        (header({"a": entry()}), "describes 4 bytes of data; the file has 0"),
        (header({"a": entry()}, b"12345"), "the file has 5"),
        (header({"a": entry(), "b": entry()}, b"1234"), "overlaps the one before"),
        (header({"a": entry(4, 8)}, b"12345678"), "leaves a hole"),
        (header({"a": entry(shape=(2,))}, b"1234"), "takes 8 bytes"),
        (header({"a": entry(shape=(2**31, 2**31, 2**31))}, b"1234"), "takes"),
        (header({"a": entry(shape=(1,) * 9)}, b"1234"), "9 dims"),
        (header({"a": entry(shape=(-1, -1))}, b"1234"), "shape must be an integer"),
        (header({"a": entry(dtype="OBJECT")}, b"1234"), "Unknown dtype 'OBJECT'"),
        (header({"a": entry() | {"code": "x"}}, b"1234"), "unknown key 'code'"),
        (header({"a": {"dtype": "F32"}}, b"1234"), "lacks 'shape'"),
        (header({"__metadata__": {"x": 1}}), "strings to strings"),
        (header({"a\x00b": entry()}, b"1234"), "printable"),
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(tmp_path)


def test_reads_outside_a_tensor(good: Path) -> None:
    checkpoint = Checkpoint.open(good)
    name = "model.norm.weight"
    for box, flat in ((Box((0,), (33,)), None), (Box((0, 0), (1, 1)), None), (None, (5, 40)), (None, (9, 3))):
        with pytest.raises(ShapeMismatch, match="is not in it"):
            checkpoint.read(name, box, flat=flat)
    with pytest.raises(ShardMissing, match="no tensor 'nope'"):
        checkpoint.read("nope")
    with pytest.raises(ShardMissing, match="no slot 'master'"):
        checkpoint.read(name, slot="master")


def test_nothing_there(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "no", "does not exist"),
        (tmp_path, "holds no checkpoint"),
        (Path(__file__), "is a file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)
