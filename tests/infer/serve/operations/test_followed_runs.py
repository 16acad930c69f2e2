"""The runs to follow: of the model and of its adapters, whose newer steps take their names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.infer.engine.planning.adapter_source import AdapterSource
from tk.infer.serve.operations.followed_runs import watchers_of
from tk.tests.infer.adapters import make_adapter
from tk.tests.infer.serve.fake_engine import FakeAdapters
from tk.tests.infer.serve.tiny_model import write_tiny_model


def engine_of(named: Path, opened: Path, adapters: dict[str, tuple[Path, Path]]) -> Any:
    """An engine whose model and adapters were named so, and opened there."""
    options = SimpleNamespace(checkpoint=named, adapters={name: given for name, (given, _) in adapters.items()})
    sources = {name: AdapterSource(str(step), "", "", 8, step=1) for name, (_, step) in adapters.items()}
    checkpoint = SimpleNamespace(path=opened)
    source = SimpleNamespace(options=options, checkpoint=checkpoint, adapters=sources)
    return SimpleNamespace(source=source, info=SimpleNamespace(step=1))


def test_only_run_folders_can_be_followed(tmp_path: Path) -> None:
    step, switch = tmp_path / "step-00000001", SimpleNamespace(reload=None, adapters=FakeAdapters())
    for named, adapters, count in (
        (tmp_path, {}, 1),
        (tmp_path, {"a": (tmp_path, step), "b": (step, step)}, 2),
        (step, {"a": (tmp_path, step)}, 1),
    ):
        assert len(watchers_of(engine_of(named, step, adapters), switch)) == count  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a run folder"):
        watchers_of(engine_of(step, step, {"a": (step, step)}), switch)  # type: ignore[arg-type]


def test_newer_steps_of_an_adapters_run_take_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, run, adapters = write_tiny_model(tmp_path / "model"), tmp_path / "sql", FakeAdapters()
    first = make_adapter(run, model)
    adapters.load("sql", first)
    switch: Any = SimpleNamespace(adapters=adapters)
    [watcher] = watchers_of(engine_of(model, model, {"sql": (run, first)}), switch)
    watcher.look()
    make_adapter(run, model, step=2)
    watcher.look()
    assert [each.sha256 for each in adapters.infos] == ["sha256 of step-00000002"]
    adapters.unload("sql")
    make_adapter(run, model, step=6)
    watcher.look()
    assert (adapters.infos, "Adapter 'sql' was unloaded" in caplog.text) == ((), True)
