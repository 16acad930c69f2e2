"""Weights of other programs in a sealed folder: named, with the way out, and never a reason to take an older step."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, RunFolder, prepare_export
from tk.checkpoint.files import lookup
from tk.checkpoint.read.step_folder import StepFolder
from tk.checkpoint.read.strangers import looks_like_weights
from tk.core.errors import CheckpointError, DamagedCheckpoint
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import llama_table, save_step

TABLE = llama_table(layers=1)


def refusal(path: Path) -> str:
    """The message with which a path is refused, which is not one about damage."""
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(path)
    assert not isinstance(error.value, DamagedCheckpoint)
    return str(error.value)


def test_two_models_in_one_folder_are_named_with_the_way_out(tmp_path: Path) -> None:
    step = save_step(tmp_path / "run", TABLE, Layout(dp=2, zero=1), side_files={"config.json": b"{}"})
    out = prepare_export(Checkpoint.open(step), tmp_path / "out").run()
    (out / "model.safetensors").write_bytes(b"x")
    (out / "config.json").write_bytes(b"[]")
    found = refusal(out)
    assert "The sealed checkpoint is model-00000.safetensors with COMMIT, manifest.json and parts/ (step 1)." in found
    assert "another program put model.safetensors there, and changed config.json." in found
    assert "move model.safetensors out of the folder and restore the changed files." in found
    assert "move model-00000.safetensors, COMMIT, manifest.json and parts/ away" in found
    for name in ("a.bin", "b.pt", "c.gguf", "d.h5"):
        (out / name).write_bytes(b"x")
    assert "put a.bin, b.pt, c.gguf and 2 more there" in refusal(out)


def test_an_adapter_has_a_way_out_of_its_own(tmp_path: Path) -> None:
    step = save_step(tmp_path / "run", TABLE, Layout())
    (step / "adapter_config.json").write_text("{}")
    (step / "adapter_model.safetensors").write_bytes(b"x")
    assert "To use the adapter, move it into a folder of its own; tk export --merge" in refusal(step)


def test_a_file_that_another_export_left_is_a_stranger(tmp_path: Path) -> None:
    """`cp -r ONE/. TWO`: the seal is that of the first, and the files of the second writer are none of its."""
    step = save_step(tmp_path / "run", TABLE, Layout(pp=1))
    (step / "model-00003.safetensors").write_bytes(b"x")
    assert "put model-00003.safetensors there" in refusal(step)


def test_a_run_does_not_pass_over_its_newest_step(tmp_path: Path) -> None:
    save_step(tmp_path / "run", TABLE, Layout(), step=1)
    newest = save_step(tmp_path / "run", TABLE, Layout(), step=2, side_files={"config.json": b"{}"})
    (newest / "model.safetensors").write_bytes(b"x")
    assert str(newest) in refusal(tmp_path / "run")
    (newest / "model.safetensors").unlink()
    (newest / "config.json").write_bytes(b"[]")
    assert f"{newest / 'config.json'} is not the file that was saved" in refusal(tmp_path / "run")


def test_a_step_with_two_models_is_neither_pruned_nor_overwritten_nor_moved(tmp_path: Path) -> None:
    steps = [save_step(tmp_path / "run", TABLE, Layout(), step=number) for number in (1, 2, 3)]
    (steps[0] / "model.safetensors").write_bytes(b"x")
    before = sorted((tmp_path / "run").iterdir())
    with RunFolder(tmp_path / "run").lock() as locked:
        assert locked.prune(1) == [steps[1]]
        with pytest.raises(CheckpointError, match="holds two models"):
            locked.begin_step(1)
    assert sorted((tmp_path / "run").iterdir()) == [path for path in before if path != steps[1]]


def test_a_folder_is_listed_once_and_parts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, listed = save_step(tmp_path / "run", TABLE, Layout(tp=2, dp=2, zero=1)), list[Path]()
    list_names = lookup.list_names

    def counted(path: Path) -> list[str]:
        listed.append(path)
        return list_names(path)

    monkeypatch.setattr(lookup, "list_names", counted)
    found = StepFolder.open(step)
    assert listed == [step]
    assert found.parts.opened == ()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("model.safetensors", True),
        ("MODEL.SAFETENSORS", True),
        ("pytorch_model-00001-of-00002.bin", True),
        ("adapter_config.json", True),
        ("model.safetensors.index.fp16.json", False),
        ("tokenizer.json", False),
        ("._model.safetensors", False),
        (".model-00000.safetensors.Zx81ya", False),
    ],
)
def test_names_of_weights(name: str, is_one: bool) -> None:
    assert looks_like_weights(name) == is_one
