"""Another step beside the running one: the same model, and memory for both."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.model_source import ModelSource, check_room, open_beside, resident_bytes
from tk.text.tokenizer import Tokenizer


@pytest.fixture
def running(model_folder: Callable[[str], Path]) -> ModelSource:
    return ModelSource.open(EngineOptions(model_folder("grouped"), kv_memory=8 << 20, kernels="aten", max_model_len=64))


def copy(running: ModelSource, target: Path, file: str, **changes: Any) -> Path:
    shutil.copytree(running.checkpoint.path, target)
    values = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(values | changes))
    return target


def test_the_next_step_is_planned_like_the_running_one(running: ModelSource, tmp_path: Path) -> None:
    source = open_beside(running, copy(running, tmp_path / "next", "config.json"), [])
    assert source.memory == running.memory
    assert replace(source.info, name="") == replace(running.info, name="", manifest_sha256=source.info.manifest_sha256)


def test_the_next_step_shares_what_texts_depend_on(
    running: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        pytest.fail("it takes megabytes, and the interpreter's lock")

    monkeypatch.setattr(Tokenizer, "of", fail)
    source = open_beside(running, copy(running, tmp_path / "next", "config.json"), [])
    assert source.tokenizer is running.tokenizer is not None
    assert source.grammars is running.grammars


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"rms_norm_eps": 0.5}, "rms_norm_eps"),
        ("config.json", {"eos_token_id": 1}, "eos_token_id"),
        ("tokenizer_config.json", {"eos_token": "a"}, "tokenizer_config.json of .* differ"),
        ("tokenizer.json", {"padding": None}, "tokenizer.json of .* differ"),
    ],
)
def test_another_model_is_refused_by_name(
    running: ModelSource, tmp_path: Path, file: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_beside(running, copy(running, tmp_path / "next", file, **changes), [])


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "generation_config.json"]
)
def test_a_file_of_texts_that_only_one_step_has_is_refused_by_name(
    running: ModelSource, tmp_path: Path, name: str
) -> None:
    folder = copy(running, tmp_path / "next", "config.json")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{name} of {folder} differ"):
        open_beside(running, folder, [])


def test_memory_must_hold_both_with_the_running_cache_full(running: ModelSource) -> None:
    plan, both = running.memory, 2 * running.memory.total_bytes
    check_room(plan, plan, resident=0, free=both)
    check_room(plan, plan, resident=plan.total_bytes + 5, free=plan.total_bytes)
    for resident, free in ((0, both - 1), (7, both - 8), (plan.total_bytes, plan.total_bytes - 1)):
        with pytest.raises(ConfigError, match="second set of weights"):
            check_room(plan, plan, resident, free)


def test_the_memory_of_processes_is_summed_and_the_dead_have_none() -> None:
    mine = resident_bytes([os.getpid()])
    assert 10 << 20 < mine < 64 << 30
    assert resident_bytes([2**22 + 1]) == 0
