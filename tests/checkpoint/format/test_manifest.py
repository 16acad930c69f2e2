"""The manifest: it comes back from its bytes, and what breaks a rule is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError
from tk.scripts.broken_checkpoints import rewrite_manifest

Document = dict[str, Any]


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
