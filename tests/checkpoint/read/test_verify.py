"""Verifying: every byte that has a checksum is read, and strange files are named."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint, prepare_export
from tk.cli.main import main
from tk.core.layout import Layout
from tk.scripts.broken_checkpoints import rewrite_manifest, rewrite_part
from tk.tests.checkpoint.hugging_face_values import STORED, folder_of
from tk.tests.checkpoint.saving import LLAMA, MIXED, llama_table, save_step


def test_verify_and_inspect_of_a_good_one(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["verify", str(llama_step.parent)]) == 0
    assert "all as written" in capsys.readouterr().out
    assert main(["inspect", str(llama_step), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["step"], found["layout"]["tp"]) == ("tk", 1, 2)
    assert found["parameters"] == sum(v["bytes"] for v in found["tensors"].values()) // 14
    assert found["tensors"]["lm_head.weight"]["shape"] == [101, 32]
    assert main(["inspect", str(llama_step)]) == 0
    text = capsys.readouterr().out
    assert "saved at    tp 2, pp 1, dp 2, ZeRO 1" in text
    assert "q_proj\n          weight  32 x 32" in text
    (llama_step / "COMMIT").unlink()
    save_step(llama_step.parent, LLAMA, Layout(), step=0)
    assert main(["inspect", str(llama_step.parent)]) == 0
    assert "step-00000001 skipped" in caplog.text


TABLE = llama_table(layers=1)


def test_verify_sees_files_that_are_none_of_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = save_step(tmp_path / "run", TABLE, Layout(tp=2), side_files={"config.json": b"{}"})
    prepare_export(Checkpoint.open(step), tmp_path / "out").run()
    for folder, name, ok in (
        (tmp_path / "out", "README.md", True),
        (tmp_path / "out", "parts/00001.json", True),
        (tmp_path / "out", "pytorch_model.bin", False),
        (tmp_path / "out", "model.safetensors", False),
        (tmp_path / "out", "adapter_config.json", False),
        (step, "pytorch_model.bin", False),
        (step, "model.safetensors.index.json", False),
    ):
        assert Checkpoint.open(folder).verify().ok
        (folder / name).write_bytes(b"x")
        assert main(["verify", str(folder)]) == (0 if ok else 3)
        said = " ".join(capsys.readouterr().err.split())
        assert (f"{folder / name} is not one of this checkpoint's files" if ok else f"put {name} there") in said
        (folder / name).unlink()
    plain = folder_of(tmp_path / "plain", STORED)
    (plain / "model.safetensors.index.json").write_bytes(b"{}")
    [note] = Checkpoint.open(plain).verify().notes
    assert "model.safetensors is read instead" in note


def _swap_names(folder: Path, one: str, two: str) -> None:
    """Exchanges two names in a header, and makes part, manifest and COMMIT fit."""
    path = folder / "model-00000.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header[one], header[two] = header[two], header[one]
    text = json.dumps(header).encode().ljust(start - 8)
    assert len(text) == start - 8
    path.write_bytes(data[:8] + text + data[start:])
    digest = hashlib.sha256(data[:8] + text).hexdigest()
    rewrite_part(folder, lambda part: part["files"][path.name].update(header_sha256=digest))


def _write_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the index and makes manifest and COMMIT fit."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    known = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    rewrite_manifest(folder, lambda manifest: manifest["files"].update({path.name: known}))


def _reshape(folder: Path) -> None:
    """Gives a tensor another shape with as many elements."""

    def change(part: dict[str, Any]) -> None:
        chunk = next(chunk for chunk in part["chunks"] if chunk["tensor"] == "model.norm.weight")
        chunk["box"] = [[0, 4], [0, 8]]

    rewrite_manifest(folder, lambda manifest: manifest["tensors"]["model.norm.weight"].update(shape=[4, 8]))
    rewrite_part(folder, change)


def _forget_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    rewrite_manifest(folder, lambda manifest: manifest["files"].pop("model.safetensors.index.json"))


QUERY, OUTPUT = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")
FORGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "names": (
        lambda folder: _swap_names(folder, QUERY, OUTPUT),
        rf"its header has {OUTPUT}.*where the manifest .* have {OUTPUT}",
    ),
    "shape": (
        _reshape,
        r"its header has model\.norm\.weight \(F32, shape \[32\].*have model\.norm\.weight \(F32, shape \[4, 8\]",
    ),
    "dtype": (
        lambda folder: rewrite_manifest(folder, lambda m: m["tensors"][QUERY].update(slots={"weight": "I32"})),
        rf"its header has {QUERY} \(F32.*have {QUERY} \(I32",
    ),
    "index, a tensor less": (
        lambda folder: _write_index(folder, lambda index: index["weight_map"].pop(QUERY)),
        rf"index\.json says nothing of {QUERY}",
    ),
    "index, a tensor more": (
        lambda folder: _write_index(folder, lambda index: index["weight_map"].update(other="model-00000.safetensors")),
        r"index\.json says model-00000\.safetensors of other",
    ),
    "index, another file": (
        lambda folder: _write_index(
            folder, lambda index: index["weight_map"].update({QUERY: "model-00001.safetensors"})
        ),
        rf"index\.json says model-00001\.safetensors of {QUERY}",
    ),
    "index, total_size": (
        lambda folder: _write_index(folder, lambda index: index["metadata"].update(total_size=7)),
        r"index\.json says total_size = 7; the weights have \d+ bytes",
    ),
    "index not sealed": (_forget_index, r"index\.json is not in the manifest"),
}


@pytest.mark.parametrize("case", FORGED)
def test_verify_compares_headers_and_index_with_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """All digests fit, so that only the content shows that `transformers` would read other tensors than tk."""
    step = save_step(tmp_path / "run", TABLE, Layout(tp=2), {"weight": "F32"}, side_files={"config.json": b"{}"})
    out = prepare_export(Checkpoint.open(step), tmp_path / "out").run()
    change, message = FORGED[case]
    change(out)
    assert main(["verify", str(out)]) == 3
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, dp=2, zero=3), Layout(pp=2, dp=2, zero=1)], ids=str)
def test_headers_of_every_layout_are_those_of_the_manifest(tmp_path: Path, layout: Layout) -> None:
    assert Checkpoint.open(save_step(tmp_path / "run", LLAMA, layout, MIXED)).verify().ok
