"""Makes checkpoints that are broken in many ways, and prints the error that each one raises.

`python scripts/broken_checkpoints.py` makes the corpus (in --out, or in a temporary folder) and prints each error.
`--flips 2000` then flips single bits and truncates files, over every file of a checkpoint, and prints how many of
these damages loading and `verify` find (it should be all). tests/checkpoint/test_corpus.py runs both, with fewer flips.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import numpy as np

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, write_part
from tk.core.errors import CheckpointError
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import Split, TensorSpec, with_slots

Document = dict[str, Any]
Change = Callable[[Path], None]

SLOTS: Final = {"weight": "F32", "exp_avg": "F32"}
MODEL: Final = "model-00000.safetensors"
TABLE: Final = with_slots(
    (
        TensorSpec("model.embed_tokens.weight", (101, 16), Split(0, rule="pad")),
        TensorSpec("model.layers.0.mlp.up_proj.weight", (48, 16), Split(0), 0),
        TensorSpec("model.layers.0.mlp.down_proj.weight", (16, 48), Split(1), 0),
        TensorSpec("model.norm.weight", (16,), None, "last"),
    ),
    SLOTS,
)


def make_good(run: Path) -> Path:
    """Makes a small complete step, saved by two ranks."""
    layout = Layout(tp=2)
    rng = np.random.default_rng(0)
    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(1)
        for rank in range(layout.world_size):
            items = owned(TABLE, layout, rank)
            values = [rng.standard_normal(item.box.size, dtype=np.float32) for item in items]
            write_part(folder, rank, TABLE, [(i, SLOTS[i.slot], v) for i, v in zip(items, values, strict=True)])
        files = {"config.json": b'{"hidden_size": 16}'}
        return commit(locked, NewStep(1, TABLE, layout, side_files=files))


def load(step: Path) -> None:
    """Loads every tensor and slot of a step, and its side files.

    Raises:
        CheckpointError: the step is damaged.
    """
    checkpoint = Checkpoint.open(step)
    for name, slot in checkpoint.chunks:
        checkpoint.read(name, slot=slot)
    checkpoint.side_files()


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def write_manifest(step: Path, data: bytes) -> None:
    """Replaces the manifest and makes COMMIT match, as an attacker would."""
    (step / "manifest.json").write_bytes(data)
    (step / "COMMIT").write_text(hashlib.sha256(data).hexdigest() + "\n")


def rewrite_manifest(step: Path, change: Callable[[Document], object]) -> None:
    """Changes the manifest's document, and COMMIT with it."""
    document = json.loads((step / "manifest.json").read_text())
    change(document)
    write_manifest(step, json.dumps(document).encode())


def write_part_data(step: Path, data: bytes, part: str = "00000.json") -> None:
    """Replaces a part and makes manifest and COMMIT match."""
    (step / "parts" / part).write_bytes(data)
    digest = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_manifest(step, lambda manifest: manifest["parts"][part].update(digest))


def rewrite_part(step: Path, change: Callable[[Document], object], part: str = "00000.json") -> None:
    """Changes a part's document, and manifest and COMMIT with it."""
    document = json.loads((step / "parts" / part).read_text())
    change(document)
    write_part_data(step, json.dumps(document).encode(), part)


def _in_manifest(change: Callable[[Document], object]) -> Change:
    return lambda step: rewrite_manifest(step, change)


def _in_part(change: Callable[[Document], object]) -> Change:
    return lambda step: rewrite_part(step, change)


def _in_chunk(**fields: object) -> Change:
    return _in_part(lambda part: part["chunks"][0].update(fields))


def _in_norm(**fields: object) -> Change:
    return _in_manifest(lambda manifest: manifest["tensors"]["model.norm.weight"].update(fields))


def _cut(name: str, keep: Callable[[int], int] = lambda size: size - 1) -> Change:
    return lambda step: os.truncate(step / name, keep((step / name).stat().st_size))


def _set_header_length(length: int) -> Change:
    def change(step: Path) -> None:
        with (step / MODEL).open("r+b") as file:
            file.write(struct.pack("<Q", length))

    return change


def _twice(document: bytes, key: bytes) -> bytes:
    return document.replace(b'"' + key + b'"', b'"' + key + b'":1,"' + key + b'"', 1)


def _dangling_link(step: Path) -> None:
    (step / MODEL).unlink()
    (step / MODEL).symlink_to(step.parent / "outside")


def _missing(name: str) -> Change:
    return lambda step: (step / name).unlink()


def _overlap(part: Document) -> None:
    chunk = next(chunk for chunk in part["chunks"] if chunk["tensor"].endswith("up_proj.weight"))
    chunk["box"] = [[24, 48], [0, 16]]


def _tied_in_a_circle(manifest: Document) -> None:
    manifest["aliases"] = {"a": "b", "b": "a"}


CASES: Final[dict[str, tuple[Change, str]]] = {
    "missing-commit": (_missing("COMMIT"), r"NotCommitted: .* has no COMMIT: its save never finished"),
    "missing-manifest": (_missing("manifest.json"), r"ShardMissing: .*manifest.json is missing"),
    "missing-part": (_missing("parts/00001.json"), r"ShardMissing: .*00001.json is missing"),
    "missing-data": (_missing(MODEL), r"ShardMissing: .*model-00000.safetensors is missing"),
    "missing-side-file": (_missing("config.json"), r"CheckpointError: .*config.json is missing"),
    "truncated-commit": (_cut("COMMIT"), r"NotCommitted: .*does not match .*COMMIT"),
    "truncated-manifest": (_cut("manifest.json"), r"NotCommitted: .*manifest.json does not match"),
    "truncated-part": (_cut("parts/00000.json"), r"ShardCorrupt: .*00000.json is not the file that was saved"),
    "truncated-data": (_cut(MODEL), r"ShardCorrupt: .*safetensors has \d+ bytes; \d+ were written"),
    "empty-data": (_cut(MODEL, lambda size: 0), r"ShardCorrupt: .*safetensors has 0 bytes; \d+ were written"),
    "longer-data": (_cut(MODEL, lambda size: size + 1), r"ShardCorrupt: .*safetensors has \d+ bytes"),
    "flipped-data": (
        lambda step: flip(step / MODEL, 5000),
        r"ShardCorrupt: .*block 0 of .*does not match its checksum",
    ),
    "flipped-header": (lambda step: flip(step / MODEL, 200), r"ShardCorrupt: .*its header is not the one"),
    "flipped-part": (lambda step: flip(step / "parts/00000.json", 99), r"ShardCorrupt: .*SHA-256 differs"),
    "flipped-manifest": (lambda step: flip(step / "manifest.json", 99), r"NotCommitted: .*does not match"),
    "flipped-side-file": (
        lambda step: flip(step / "config.json", 5),
        r"CheckpointError: .*config.json is not the file",
    ),
    "oversized-header": (_set_header_length(2**62), r"ShardCorrupt: .*its header is not the one that was written"),
    "overlapping-boxes": (_in_part(_overlap), r"ManifestError: .*do not hold each of \d+ exactly once"),
    "overlapping-bytes": (_in_part(lambda p: p["chunks"].append(p["chunks"][0])), r"ManifestError: .*overlap in model"),
    "hole": (_in_part(lambda p: p["chunks"].pop()), r"ManifestError: .*exactly once"),
    "path-in-chunk": (_in_chunk(file="../../../etc/passwd"), r"ManifestError: .*is not a plain file name"),
    "path-in-part": (
        _in_part(lambda p: p["files"].update({"/etc/passwd": p["files"][MODEL]})),
        r"ManifestError: .*'/etc/passwd' is not a plain file name",
    ),
    "path-in-side-file": (
        _in_manifest(lambda m: m["files"].update({"../.bashrc": m["files"]["config.json"]})),
        r"ManifestError: .*'../.bashrc' is not a plain file name",
    ),
    "dangling-link": (_dangling_link, r"CheckpointError: .* is a link to .*outside, which does not exist"),
    "duplicate-key-in-manifest": (
        lambda step: write_manifest(step, _twice((step / "manifest.json").read_bytes(), b"step")),
        r"ManifestError: .*has the key 'step' twice",
    ),
    "duplicate-key-in-part": (
        lambda step: write_part_data(step, _twice((step / "parts/00000.json").read_bytes(), b"writer")),
        r"ManifestError: .*has the key 'writer' twice",
    ),
    "deep-json": (
        lambda step: write_manifest(step, b'{"format":' + b"[       " * 10**5),
        r"ManifestError: .*nested deeper than 32",
    ),
    "dense-json": (
        lambda step: write_manifest(step, b'{"format":[' + b"[]," * 10**5),
        r"ManifestError: .*holds \d+ values in \d+ bytes",
    ),
    "dense-strings": (
        lambda step: write_part_data(step, b'{"chunks":[' + b'"ab",' * 10**5),
        r"ManifestError: .*holds \d+ strings in \d+ bytes",
    ),
    "no-json": (lambda step: write_part_data(step, b"\x80\x04K\x01."), r"ManifestError: .*is not UTF-8"),
    "aliases-in-a-circle": (_in_manifest(_tied_in_a_circle), r"ManifestError: .*'a' must be no stored tensor and name"),
    "absurd-shape": (_in_norm(shape=[2**40, 2**40]), r"ManifestError: .*is refused"),
    "absurd-chunk": (_in_chunk(nbytes=2**61), r"ManifestError: .*crc must be an array of"),
    "absurd-box": (_in_chunk(box=[[0, 2**40], [0, 16]]), r"ManifestError: .*lies outside shape"),
    "absurd-offset": (_in_chunk(offset=2**61), r"ManifestError: .*lies outside the part's files"),
    "absurd-file": (_in_part(lambda p: p["files"][MODEL].update(size=2**61)), r"ShardCorrupt: .*were written"),
    "negative-box": (_in_chunk(box=[[-1, 3], [0, 16]]), r"ManifestError: .*box must be an integer from 0"),
    "inverted-box": (_in_chunk(box=[[3, 1], [0, 16]]), r"ManifestError: .*box must be an integer from 3"),
    "wrong-dtype": (_in_norm(slots={"weight": "BF16", "exp_avg": "F32"}), r"ManifestError: .*its 16 elements take 32"),
    "unknown-dtype": (
        _in_norm(slots={"weight": "OBJECT"}),
        r"CheckpointError: .*model.norm.weight: slot weight has the unknown dtype 'OBJECT'",
    ),
    "wrong-shape": (_in_norm(shape=[17]), r"ManifestError: .*do not hold each of 17 exactly once"),
    "unlisted-tensor": (
        _in_manifest(lambda m: m["parts"]["00000.json"].update(tensors=[])),
        r"ManifestError: .*(exactly once|does not list for it)",
    ),
    "newer-version": (
        _in_manifest(lambda m: m.update(version=4)),
        r"CheckpointError: .*this tk reads 'tk', versions 1 to 3. Read it with the tk that wrote it",
    ),
}


def explain(step: Path) -> str:
    """Returns the error of loading a step as "Class: message", or "" if it loads."""
    try:
        load(step)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def is_found_by_verify(step: Path) -> bool:
    """Returns whether `tk verify` would refuse the step."""
    try:
        return not Checkpoint.open(step).verify().ok
    except CheckpointError:
        return True


def damages(step: Path, number: int, seed: int = 0) -> Iterator[str]:
    """Damages one file after another; yields a description of each damage, and undoes it before the next.

    Five of six damages are a flipped bit, the others a truncation, at a random place; files are taken in turn.
    """
    rng = np.random.default_rng(seed)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    for index in range(number):
        path = files[index % len(files)]
        data = path.read_bytes()
        place = int(rng.integers(len(data)))
        if rng.integers(6) == 0:
            path.write_bytes(data[:place])
            yield f"{path.name} cut to {place} of {len(data)} bytes"
        else:
            bit = int(rng.integers(8))
            flip(path, place, bit)
            yield f"{path.name}: bit {bit} of byte {place} flipped"
        path.write_bytes(data)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Keep the corpus in this new folder.")
@click.option("--flips", default=0, help="Number of bit flips and truncations to try.")
def main(out: Path | None, flips: int) -> None:
    """Print each broken checkpoint's name and error; exit with 1 if a damage is not found."""
    missed = 0
    with TemporaryDirectory() as name:
        good = make_good(Path(name) / "good")
        for case, (change, _) in CASES.items():
            step = Path(shutil.copytree(good, (out or Path(name)) / case / good.name, symlinks=True))
            change(step)
            print(f"{case:<26} {explain(step).replace(os.fspath(step), 'STEP')}")
        if flips:
            for damage in damages(good, flips):
                if not explain(good) or not is_found_by_verify(good):
                    missed += 1
                    print(f"not found: {damage}")
            print(f"loading and verify find {flips - missed} of {flips} flips and truncations")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
