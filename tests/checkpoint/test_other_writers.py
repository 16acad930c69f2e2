"""Commands of ours, a writer that is not ours, commands of ours again: never old weights beside new ones, unseen.

After each writer our commands give what `transformers` reads from the same folder, or the bytes that we wrote, or a
refusal that names the file. `other_writers.py` has the table; `make test` takes each writer with one kind of folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tk.checkpoint import Checkpoint, Options, prepare_export, prepare_reshard
from tk.cli.main import main
from tk.core.errors import CheckpointError
from tk.core.layout import Layout
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning.model_source import ModelSource
from tk.tests.checkpoint.other_writers import SAME, THEIRS, WRITERS
from tk.tests.checkpoint.saving import LLAMA, LLAMA_CONFIG, save_step

KINDS: Final = ("exported", "plain", "step", "resharded")  # as made by tk export, export --plain, train, reshard --tp 2
WITHOUT: Final = {  # kinds that lack the file; a folder without config.json is no model for `transformers`
    "an editor, the index": "resharded",
    "rm, index": "resharded",
    "rm, config.json": "plain",
}
FIRST: Final = {"transformers, one file": ("exported", "plain", "step"), "dvc": ("exported", "plain")}  # in `make test`


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model as each kind of folder."""
    home = tmp_path_factory.mktemp("made")
    files = {"config.json": json.dumps(LLAMA_CONFIG).encode()}
    step = Checkpoint.open(save_step(home / "run", LLAMA, Layout(dp=2, zero=1), side_files=files))
    prepare_export(step, home / "exported").run()
    prepare_export(step, home / "plain", plain=True).run()
    prepare_reshard(step, home / "resharded", Options(Layout(tp=2), weights_only=True)).run()
    return home


def cases() -> list[Any]:
    """Every writer with every kind of folder; without the mark, each writer with a sealed and sometimes others."""
    found = []
    for number, name in enumerate(WRITERS):
        kinds = [kind for kind in KINDS if kind != WITHOUT.get(name)]
        chosen = FIRST.get(name, (kinds[number % len(kinds)],))
        found += [
            pytest.param(kind, name, marks=() if kind in chosen else pytest.mark.matrix, id=f"{kind}-{name}")
            for kind in kinds
        ]
    return found


def values(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight as we read it."""
    found = Checkpoint.open(folder)
    found.check()
    return {name: found.read(name).torch() for name in found.tensors}


def theirs(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight as `transformers` reads it."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict())


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == wanted[name].dtype for name in wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def commands(folder: Path, original: Path, new: Path) -> dict[str, list[str]]:
    """Commands that open the folder, by name."""
    return {
        "inspect": ["inspect", str(folder)],
        "verify": ["verify", str(folder)],
        "diff": ["diff", str(folder), str(original)],
        "export": ["export", str(folder), str(new / "exported")],
        "reshard": ["reshard", str(folder), str(new / "resharded"), "--tp", "2", "--weights-only"],
    }


@pytest.mark.parametrize(("kind", "name"), cases())
def test_another_writer_between_our_commands(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    source = made / "run" / "step-00000001" if kind == "step" else made / kind
    before = Path(shutil.copytree(source, tmp_path / "place" / source.name))
    folder = WRITERS[name].write(before)
    outcome = WRITERS[name].plain if kind == "plain" else WRITERS[name].sealed
    new = tmp_path / "new"
    capsys.readouterr()
    if outcome not in (SAME, THEIRS):
        with pytest.raises(CheckpointError) as error:
            values(folder)
        assert outcome in str(error.value)
        for words in commands(folder, source, new).values():
            assert main(words) == 3, words
            assert outcome.split()[-1] in " ".join(capsys.readouterr().err.split())
        assert not list(new.glob("*"))
        return
    found = values(folder)
    assert_equal(found, values(source) if outcome == SAME else theirs(folder))
    if kind != "resharded" or outcome == THEIRS:
        assert_equal(found, theirs(folder))
    for command, words in commands(folder, source, new).items():
        assert main(words) == (1 if command == "diff" and outcome == THEIRS else 0), (words, capsys.readouterr().err)
    assert_equal(values(new / "resharded"), found)
    assert_equal(theirs(new / "exported"), found)
    ModelSource.open(EngineOptions(checkpoint=folder))
