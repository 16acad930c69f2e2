"""The manifest: it comes back from its bytes, and a manifest that breaks a rule is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.format import manifest as module
from tk.checkpoint.format.chunk import Chunk, Part
from tk.checkpoint.format.manifest import FileDigest, Manifest, PartRecord, StoredTensor
from tk.core.errors import CheckpointError, ManifestError
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.tensors import Split
from tk.scripts.broken_checkpoints import rewrite_manifest

Document = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=4), "this tk reads 'tk', versions 1 to 3. Read it with the tk that wrote it"),
        (lambda m: m.update(version=0), r"this tk reads 'tk', versions 1 to 3\.$"),
        (lambda m: m["layout"].update(cp=2), "has an unknown key 'cp'"),
        (lambda m: m.update(version=2, layout=m["layout"] | {"cp": 0}), "layout: cp = 0"),
        (lambda m: m.update(version=2, layout=m["layout"] | {"ep": 3}), "layout: ep x expert_tp = 3 x 1 does not"),
        (lambda m: m.update(format="pt"), "this tk reads 'tk'"),
        (lambda m: m.update(step=-1), "step must be an integer"),
        (lambda m: m.pop("layout"), "lacks 'layout'"),
        (lambda m: m["layout"].update(tp=0), "tp = 0"),
        (lambda m: m["layout"].update(tp="2"), "tp must be an integer"),
        (lambda m: m["parts"].update({"../x.json": m["parts"]["00000.json"]}), "not a plain file name"),
        (lambda m: m["files"].update({".bashrc": m["files"]["config.json"]}), "not a plain file name"),
        (lambda m: m["files"].update({"gone.json": m["files"]["config.json"]}), "gone.json is missing"),
        (lambda m: m["files"].update({"a/../../b.json": m["files"]["config.json"]}), "not a plain file name"),
        (lambda m: m["files"].update({"/b.json": m["files"]["config.json"]}), "not a plain file name"),
        (lambda m: m["tensors"]["model.norm.weight"].update(shape=[2**70]), "shape must be an integer"),
        (lambda m: m["tensors"]["model.norm.weight"].update(shape=[2**40, 2**40]), "is refused"),
        (lambda m: m["tensors"]["model.norm.weight"].update(shape=[31]), "model.norm.weight"),
        (lambda m: m["tensors"]["model.norm.weight"].update(layer=1.5), "layer must be an integer"),
        (
            lambda m: m["tensors"]["model.norm.weight"]["slots"].update(weight="F33"),
            "manifest.json: model.norm.weight: slot weight has the unknown dtype 'F33'",
        ),
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
def test_hostile_manifests(step: Path, change: Callable[[Document], None], message: str) -> None:
    rewrite_manifest(step, change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open_step(step)


@pytest.mark.parametrize(
    ("layout", "version"),
    [
        (Layout(tp=2, pp=3, dp=4, zero=1), 1),
        (Layout(tp=2, dp=2, expert_tp=2), 1),
        (Layout(tp=2, dp=2, cp=4), 2),
        (Layout(tp=2, dp=2, ep=4), 2),
        (Layout(tp=2, dp=2, expert_tp=1), 2),
    ],
    ids=str,
)
def test_a_manifest_comes_back_from_its_bytes(layout: Layout, version: int) -> None:
    tensors = {
        "a": StoredTensor((8, 4), {"weight": "BF16", "master": "F32"}, Split(0, 2, "replicate", "heads"), 3),
        "b": StoredTensor((), {"weight": "F32"}, None, "last"),
    }
    manifest = Manifest(
        step=7,
        layout=layout,
        tensors=tensors,
        aliases={"c": "a"},
        param_groups=({"params": ["a"], "lr": 0.1},),
        resume={"step": 7, "nested": [1, {"x": None}]},
        files={"config.json": FileDigest.of(b"{}")},
        parts={"00000.json": PartRecord(FileDigest.of(b"part"), (0, 1))},
    )
    data = manifest.to_bytes()
    assert Manifest.parse(data, "the manifest") == manifest
    assert json.loads(data)["version"] == version
    assert ({"cp", "ep", "expert_tp"} & set(json.loads(data)["layout"]) != set()) == (version == 2)
    assert [(spec.name, spec.shape, spec.layer) for spec in manifest.table] == [("a", (8, 4), 3), ("b", (), "last")]


def test_a_parts_record_lists_its_tensors_by_their_places_among_all() -> None:
    chunks = [Chunk(name, "weight", Box.whole((1,)), None, "f", 0, 4, ()) for name in ("c", "a", "c")]
    assert PartRecord.of(b"", Part(0, {}, tuple(chunks)), ["c", "b", "a"]).tensors == (0, 2)


def test_a_manifest_that_no_reader_would_accept_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(1, Layout(), {"a": StoredTensor((1,), {"weight": "F32"})})
    size = len(manifest.to_bytes())
    monkeypatch.setattr(module, "MAX_MANIFEST", size + 80)
    manifest.check_size(10)
    with pytest.raises(ManifestError, match=f"some {size + 88} bytes, and {size + 80} are accepted"):
        manifest.check_size(11)
