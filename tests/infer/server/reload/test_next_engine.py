"""The run folder to follow."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.infer.server.reload.next_engine import run_of


def engine_of(named: Path, opened: Path) -> Any:
    options, checkpoint = SimpleNamespace(checkpoint=named), SimpleNamespace(path=opened)
    return SimpleNamespace(options=options, source=SimpleNamespace(checkpoint=checkpoint))


def test_only_a_run_folder_can_be_followed(tmp_path: Path) -> None:
    step = tmp_path / "step-00000001"
    assert run_of(engine_of(tmp_path, step)) == tmp_path.resolve()
    with pytest.raises(ConfigError, match="needs a run folder"):
        run_of(engine_of(step, step))
