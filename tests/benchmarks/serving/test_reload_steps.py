"""The steps that bench_reload_soak.py serves, and the edits of their files."""

import random
from pathlib import Path

import pytest

from tk.benchmarks.serving.reload_steps import Edit, files_of, save_steps
from tk.checkpoint import Checkpoint
from tk.tests.infer.serve.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("steps")
    model = write_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    return save_steps(model, folder / "run", 2)


def test_steps_have_weights_of_their_own_and_the_texts_of_the_model(steps: list[Path]) -> None:
    first, second = map(Checkpoint.open, steps)
    assert (first.step, second.step) == (1, 2)
    assert first.side_files() == second.side_files()
    assert "chat_template.jinja" in first.side_files()
    for name, same in (("model.norm.weight", False), ("lm_head.weight", True)):
        assert (first.read(name).numpy() == second.read(name).numpy()).all() == same


def test_every_edit_changes_a_file_and_is_undone(steps: list[Path]) -> None:
    files = files_of(steps[0])
    assert {"COMMIT", "config.json", "tokenizer.json"} < {file.name for file in files}
    before = {file: file.read_bytes() for file in files}
    for number, file in enumerate(files * 8):
        edit = Edit(file, random.Random(number))
        assert not file.exists() or file.read_bytes() != before[file] or not before[file]
        edit.undo()
        assert {each: each.read_bytes() for each in files_of(steps[0])} == before
    assert Checkpoint.open(steps[0]).verify().ok
