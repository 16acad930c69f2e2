"""An empty path is refused wherever a caller gives one in Python; tests/cli/test_common.py has the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tk.checkpoint import Checkpoint, Options, export_links, prepare_export, prepare_reshard, reshard
from tk.core.errors import ConfigError
from tk.core.given_paths import as_path, near_path
from tk.core.layout import Layout
from tk.infer import LLM, AsyncLLM
from tk.tests.checkpoint.saving import LLAMA, save_step
from tk.train import initialize

CALLS: dict[str, Callable[[Checkpoint], Any]] = {
    "open": lambda good: Checkpoint.open(""),
    "reshard": lambda good: prepare_reshard(good, "", Options(Layout())),
    "reshard from": lambda good: reshard("", "new", layout=Layout()),
    "export": lambda good: prepare_export(good, ""),
    "linked export": lambda good: export_links(good, ""),
    "LLM": lambda good: LLM(""),
    "AsyncLLM": lambda good: AsyncLLM(""),
    "save": lambda good: initialize(nn.Linear(2, 2), {"lr": 0.1}).save(""),
    "load": lambda good: initialize(nn.Linear(2, 2), {"lr": 0.1}).load(""),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_empty_path_is_not_the_current_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = save_step(tmp_path / "run", LLAMA, Layout())
    monkeypatch.chdir(step)
    before = sorted(step.iterdir())
    good = Checkpoint.open(".")
    with pytest.raises(ConfigError, match=r"The path is empty\. Is a variable of a script not set\? Write \. for"):
        CALLS[name](good)
    assert sorted(step.iterdir()) == before


@pytest.mark.parametrize("given", [3, None, b"folder", ["folder"]])
def test_another_thing_is_no_path(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"The path is a {type(given).__name__}; it must be a str"):
        as_path(given)


def test_a_path_stays_as_it_is() -> None:
    assert as_path("a/b") == as_path(Path("a/b")) == Path("a/b")
    assert as_path(".") == Path()


def test_a_near_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    assert near_path(tmp_path / "dmeo") == f" Did you mean {tmp_path / 'demo'}?"
    assert near_path(tmp_path / "another") == ""
    assert near_path(tmp_path / "nowhere" / "demo") == ""
