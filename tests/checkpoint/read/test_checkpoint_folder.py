"""The two kinds of folders answer the same questions."""

from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, prepare_export
from tk.checkpoint.read.checkpoint_folder import CheckpointFolder
from tk.checkpoint.read.hugging_face_folder import HuggingFaceFolder
from tk.checkpoint.read.locate import open_folder
from tk.checkpoint.read.step_folder import StepFolder
from tk.core.layout import Layout


def opened(folder: Path) -> CheckpointFolder:
    """The folder as a checkpoint, whichever kind it is."""
    found = open_folder(folder)
    assert found is not None
    found.check()
    return found


@pytest.fixture(params=["tk", "huggingface"])
def folder(request: pytest.FixtureRequest, step: Path, tmp_path: Path) -> Path:
    """The same weights as one rank's step, and as a plain Hugging Face folder."""
    plain = request.param == "huggingface"
    target = prepare_export(Checkpoint.open(step), tmp_path / request.param, plain=plain).run()
    assert opened(target).kind == request.param
    return target


def test_a_folder_without_any_mark_is_no_checkpoint(tmp_path: Path) -> None:
    assert open_folder(tmp_path) is None


def test_only_a_step_records_its_layout_and_its_checksums(step: Path, tmp_path: Path) -> None:
    plain = prepare_export(Checkpoint.open(step), tmp_path / "plain", plain=True).run()
    ours, theirs = StepFolder.open(step), HuggingFaceFolder.open(plain)
    assert (ours.has_checksums, ours.has_splits) == (True, True)
    assert (theirs.has_checksums, theirs.has_splits) == (False, False)
    assert (theirs.manifest.step, theirs.manifest.layout, theirs.manifest.resume) == (0, Layout(), {})
    assert not theirs.parts
    assert {name: tensor.shape for name, tensor in theirs.manifest.tensors.items()} == {
        name: tensor.shape for name, tensor in ours.manifest.tensors.items()
    }


def test_sizes_are_those_of_the_files(folder: Path) -> None:
    sizes = opened(folder).file_sizes()
    assert sizes == {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}


def test_every_chunk_lies_in_a_data_file_that_opens(folder: Path) -> None:
    found = opened(folder)
    for chunks in found.chunks.values():
        for chunk in chunks:
            assert chunk.file in found.file_sizes()
    Checkpoint(found).read("model.norm.weight")


def test_a_fingerprint_lasts_until_a_file_is_replaced(folder: Path, step: Path, tmp_path: Path) -> None:
    before = opened(folder)
    assert opened(folder).fingerprint == before.fingerprint
    other = tmp_path / "other"
    prepare_export(Checkpoint.open(step), other, plain=before.kind == "huggingface").run()
    if before.kind == "tk":
        assert opened(other).fingerprint == before.fingerprint, "the manifest has a checksum of every byte"
    else:
        [data] = folder.glob("*.safetensors")
        (other / data.name).replace(data)  # the same header
        assert opened(folder).digest == before.digest
        assert opened(folder).fingerprint != before.fingerprint


def test_side_files_are_read_by_name(folder: Path) -> None:
    found = opened(folder)
    assert found.read_side_files(["config.json", "tokenizer.json"]) == {"config.json": b"{}"}
    assert found.read_side_files([]) == {}
    assert found.read_side_files()["config.json"] == b"{}"
    assert found.side_paths()["config.json"] == folder / "config.json"


def test_all_that_was_written_may_be_replaced_and_a_strange_file_is_noted(folder: Path) -> None:
    found = opened(folder)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names <= found.removable_files()
    assert found.notes() == found.left_behind() == []
    (folder / "old.safetensors").write_bytes(b"")
    (folder / ".DS_Store").write_bytes(b"")
    assert found.left_behind() == ["old.safetensors"]
    assert any("old.safetensors is n" in note for note in found.notes())
