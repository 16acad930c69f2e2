"""`tk plot`: the picture shows the recorded values; and the same values for TensorBoard."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from tk.cli.main import main
from tk.cli.plot import plot
from tk.core.line_chart import COLOURS
from tk.tests.train.conftest import Configure
from tk.train.records.curves import read_run
from tk.train.records.metrics import MetricsFile

SVG = "{http://www.w3.org/2000/svg}"


def _run(folder: Path, num_steps: int, first_loss: float = 8.0) -> Path:
    folder.mkdir()
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": first_loss / step, "lr": 1e-3, "grad_norm": 1.0 + step, "tokens_per_second": 5e3}
        for step in range(1, num_steps + 1)
    ]
    lines.append({"step": num_steps, "eval_loss": 2.5, "eval_perplexity": 12.2})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "los')
    return folder


def _lines(root: ElementTree.Element, panel: int) -> list[list[tuple[float, float]]]:
    group = root.findall(f"{SVG}g")[panel]
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.get("points", "").split())]
        for line in group.findall(f"{SVG}polyline")
    ]


def test_every_run_has_its_curves_and_its_colour(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", 10), _run(tmp_path / "b & c", 4000, first_loss=4.0)]
    target = tmp_path / "new" / "both.svg"
    shown = CliRunner().invoke(plot, [*map(str, runs), "-o", str(target)])
    assert shown.exit_code == 0, shown.output
    root = ElementTree.fromstring(target.read_text())
    loss_a, evaluation_a, loss_b, evaluation_b = _lines(root, 0)
    assert [len(curve) for curve in (loss_a, evaluation_a, evaluation_b)] == [10, 1, 1]
    assert 1000 < len(loss_b) <= 1500, "as fine as a screen shows"
    heights = [y for _, y in loss_a]
    assert heights == sorted(heights), "a falling loss goes down, and y counts from the top"
    assert loss_a[0][1] < loss_b[0][1], "8 stands above 4"
    text = target.read_text()
    assert "b &amp; c" in text
    assert all(text.count(colour) >= 5 for colour in COLOURS[:2])


def texts(root: ElementTree.Element, panel: int) -> list[str]:
    return [text.text or "" for text in root.findall(f"{SVG}g")[panel].findall(f"{SVG}text")]


def test_axes_say_what_and_in_which_unit_and_dashes_what_they_are(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", 10)
    assert CliRunner().invoke(plot, [str(run)]).exit_code == 0
    root = ElementTree.fromstring((run / "curves.svg").read_text())
    labels = (
        "loss (nats per token)",
        "learning rate (no unit)",
        "L2 norm before clipping (no unit)",
        "tokens per second",
    )
    for panel, label in enumerate(labels):
        assert {"training step", label} <= set(texts(root, panel))
        assert ({"training", "held-out"} <= set(texts(root, panel))) == (panel == 0)
    keys = [path for path in root.findall(f"{SVG}g")[0].findall(f"{SVG}path") if "h24" in path.get("d", "")]
    assert [path.get("stroke-dasharray") for path in keys] == ["6 4", None], "from the right: held-out, training"


def test_a_flat_curve_and_large_numbers_have_round_ticks(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", 3)
    assert CliRunner().invoke(plot, [str(run)]).exit_code == 0
    text = (run / "curves.svg").read_text()
    assert "5,000<" in text
    assert re.search(r">0\.001<", text)


def test_a_folder_without_metrics_and_a_png_without_its_extra_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "metrics.jsonl: No such file" in capsys.readouterr().err
    run = _run(tmp_path / "a", 3)
    monkeypatch.setattr("tk.train.config.extras.find_spec", lambda name: None)
    assert main(["plot", str(run), "-o", str(tmp_path / "a.png")]) == 2
    assert "pip install 'resvg-py>=" in capsys.readouterr().err
    assert main(["plot", str(run), "-o", str(tmp_path / "a.jpg")]) == 2


def test_tensorboard_gets_the_values_of_the_metrics_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, log_dir: str, purge_step: int) -> None:
            assert (log_dir, purge_step) == (str(tmp_path / "tensorboard"), 8)

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written.append((tag, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("tk.train.records.metrics.require_tensorboard", lambda: None)
    metrics = MetricsFile(tmp_path, 7, "attempt", tensorboard=True)
    metrics.write(step=8, loss=2.5, lr=1e-3)
    metrics.close()
    assert written == [("loss", 2.5, 8), ("lr", 1e-3, 8), ("closed", 0.0, 0)]
    assert read_run(tmp_path).curves["loss"] == [(8, 2.5)]


def test_tensorboard_without_its_extra_is_refused_before_anything_starts(
    configure: Configure, write_toml: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tk.train.config.extras.find_spec", lambda name: None)
    config = write_toml(configure(metrics={"tensorboard": True}))
    assert main(["train", str(config)]) == 2
    assert "pip install 'tensorboard>=" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
