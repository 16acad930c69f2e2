"""Both ways with libraries we did not write: safetensors reads every file, transformers loads every export."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tk.checkpoint import Checkpoint, Options, export_links, prepare_export, prepare_reshard, reshard
from tk.core import dtypes
from tk.core.errors import CheckpointError, ConfigError, ManifestError, ShapeMismatch, ShardMissing
from tk.core.layout import Layout
from tk.core.tensors import TensorSpec
from tk.tests.checkpoint.saving import MIXED, llama_table, save_step, true_values
from tk.tests.model.tiny_llama import TINY_LLAMA

TABLE = llama_table(layers=2, tied=False)
TIED = llama_table(layers=2, tied=True)


def build(tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, tie_word_embeddings=tied))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import LlamaForCausalLM

    found: Any = LlamaForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model, info = found
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "model"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def indexed(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "indexed"
    model.save_pretrained(path, max_shard_size="20kB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def assert_same_values(found: Checkpoint, wanted: dict[str, torch.Tensor]) -> None:
    assert set(found.tensors) == set(wanted)
    for name, values in wanted.items():
        assert torch.equal(found.read(name).torch(), values), name


def test_a_folder_of_one_file_or_many_is_read_as_it_lies(folder: Path, indexed: Path, model: Any) -> None:
    for path in (folder, indexed):
        found = Checkpoint.open(path)
        assert_same_values(found, model.state_dict())
        assert found.config()["hidden_size"] == 32
        assert not found.verify().has_checksums
    assert Checkpoint.open(folder).manifest_sha256 != Checkpoint.open(indexed).manifest_sha256


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_through_tp_2_and_back_to_transformers(tmp_path: Path, plain: bool, tied: bool) -> None:
    model = build(tied)
    model.save_pretrained(tmp_path / "hf")
    sharded = reshard(tmp_path / "hf", tmp_path / "tp2", layout=Layout(tp=2), table=TIED if tied else TABLE)
    assert_same_values(Checkpoint.open(sharded), model.state_dict())
    prepare_export(Checkpoint.open(sharded), tmp_path / "out", plain=plain).run()
    found = loaded(tmp_path / "out")
    for name, values in model.state_dict().items():
        assert torch.equal(found[name], values), name
    assert (tmp_path / "out" / "manifest.json").exists() != plain
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == tied
    assert_same_values(Checkpoint.open(tmp_path / "out"), model.state_dict())


def test_a_saved_step_at_tp_1_is_a_folder_that_transformers_loads(tmp_path: Path, folder: Path) -> None:
    for layout in (Layout(dp=3, zero=1), Layout(pp=2, dp=2, zero=2)):
        run = tmp_path / f"run{layout.pp}"
        config = (folder / "config.json").read_bytes().replace(b"float32", b"bfloat16")
        saved = save_step(run, TABLE, layout, side_files={"config.json": config})
        found = loaded(saved)
        for spec in TABLE:
            bits = found[spec.name].view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(bits, true_values(spec, "weight", "BF16")), spec.name


def test_no_index_is_written_where_tensors_are_cut(tmp_path: Path) -> None:
    saved = save_step(tmp_path / "run", TABLE, Layout(tp=2))
    assert not (saved / "model.safetensors.index.json").exists()


def test_the_safetensors_library_reads_every_file(tmp_path: Path) -> None:
    saved = Checkpoint.open(save_step(tmp_path / "run", TABLE, Layout(tp=2, dp=2, zero=1)))
    by_place = {(c.file, c.offset): c for chunks in saved.chunks.values() for c in chunks}
    seen = 0
    for path in sorted(saved.path.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        assert start % 4096 == 0
        header = json.loads(raw[8:start])
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "tk": "1"}
            for name in file.keys():  # noqa: SIM118  # not a dict
                chunk = by_place[path.name, start + header[name]["data_offsets"][0]]
                wanted = saved.read(chunk.tensor, chunk.box, chunk.slot, chunk.flat)
                assert torch.equal(file.get_tensor(name), wanted.torch())
                assert name in (chunk.tensor, f"{chunk.tensor}@{chunk.slot}#0")
                seen += 1
    assert seen == len(by_place)


def test_export_casts_as_torch_does_and_changes_the_config(tmp_path: Path, folder: Path, model: Any) -> None:
    prepared = prepare_reshard(
        Checkpoint.open(folder), tmp_path / "bf16", Options(Layout(), dtypes.BF16, weights_only=True), TABLE
    )
    prepared.run()
    found = loaded(tmp_path / "bf16")
    for name, values in model.state_dict().items():
        assert torch.equal(found[name], values.to(torch.bfloat16)), name


def test_linked_export_shares_the_files_and_keeps_checksums(tmp_path: Path, folder: Path) -> None:
    config = {"config.json": (folder / "config.json").read_bytes()}
    saved = save_step(tmp_path / "run", TABLE, Layout(dp=2, zero=1), side_files=config)
    out = export_links(Checkpoint.open(saved), tmp_path / "out")
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert names == sorted(path.name for path in saved.glob("model-*.safetensors"))
    assert all((out / name).samefile(saved / name) for name in names)
    found = Checkpoint.open(out)
    assert found.verify().ok
    assert all(set(tensor.slots) == {"weight"} for tensor in found.tensors.values())
    assert set(loaded(out)) == {spec.name for spec in TABLE}
    cut = save_step(tmp_path / "cut", TABLE, Layout(tp=2))
    for source, message in ((cut, "leave out --link"), (folder, "no tk checkpoint")):
        with pytest.raises(ConfigError, match=message):
            export_links(Checkpoint.open(source), tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_names_without_the_base_models_prefix(tmp_path: Path, model: Any) -> None:
    model.model.save_pretrained(tmp_path / "base")
    found = Checkpoint.open(tmp_path / "base")
    wanted = {name: values for name, values in model.state_dict().items() if name != "lm_head.weight"}
    assert_same_values(found, wanted)


def test_links_are_followed_and_those_to_nowhere_named(tmp_path: Path, folder: Path, model: Any) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    for path in (blobs, snapshot):
        path.mkdir(parents=True)
    for index, name in enumerate(("config.json", "model.safetensors")):
        (blobs / f"{index}").write_bytes((folder / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{index}")
    assert_same_values(Checkpoint.open(snapshot), model.state_dict())
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.symlink(folder / name, outside / name)
    assert_same_values(Checkpoint.open(outside), model.state_dict())
    assert loaded(outside).keys() == model.state_dict().keys()
    (outside / "config.json").unlink()
    os.symlink(tmp_path / "gone", outside / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to .*gone, which does not exist"):
        Checkpoint.open(outside)


def test_a_table_must_be_the_folders(tmp_path: Path, folder: Path) -> None:
    source = Checkpoint.open(folder)
    wider = tuple(TensorSpec(s.name, (*s.shape[:-1], 64), s.split, s.layer) for s in TABLE)
    for table, message in ((wider, r"should have shape .*64"), (TABLE[:-1], "lm_head.weight, which its arch")):
        with pytest.raises(ShapeMismatch, match=message):
            prepare_reshard(source, tmp_path / "x", Options(Layout(tp=2)), table)
    with pytest.raises(ConfigError, match="pass its architecture's table"):
        prepare_reshard(source, tmp_path / "x", Options(Layout(tp=2)))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ({"weight_map": {"a": "../evil.safetensors"}}, ManifestError, "not a plain file name"),
        ({"weight_map": {"a": "/etc/passwd"}}, ManifestError, "not a plain file name"),
        ({"weight_map": {}}, ManifestError, "names no tensors"),
        ({"weight_map": ["a"]}, ManifestError, "must be an object"),
        ({"weight_map": {"a": "gone.safetensors"}}, ShardMissing, "gone.safetensors is missing"),
        ({"weight_map": {"a": "part.safetensors"}}, ShardMissing, "lacks a"),
    ],
)
def test_a_wrong_index(tmp_path: Path, folder: Path, index: object, error: type[Exception], message: str) -> None:
    (tmp_path / "part.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=message):
        Checkpoint.open(tmp_path)


def test_a_tk_file_is_never_read_as_a_hugging_face_one(tmp_path: Path) -> None:
    saved = save_step(tmp_path / "run", TABLE, Layout(dp=2), MIXED)
    for name in ("manifest.json", "COMMIT"):
        (saved / name).unlink()
    with pytest.raises(CheckpointError, match="never finished"):
        Checkpoint.open(saved)
    for part in (saved / "parts").iterdir():
        part.unlink()
    (saved / "parts").rmdir()
    with pytest.raises(CheckpointError, match="belongs to a tk checkpoint"):
        Checkpoint.open(saved)
