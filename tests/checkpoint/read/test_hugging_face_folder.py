"""Which files of a Hugging Face folder count, under which names, and through which links."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint, export_links, prepare_export, reshard
from tk.checkpoint.read.hugging_face_folder import BASE_PREFIXES
from tk.cli.main import main
from tk.core.errors import CheckpointError
from tk.core.layout import Layout
from tk.model.config import ModelConfig
from tk.model.registry import architectures, tensor_table
from tk.tests.checkpoint.other_writers import hub_cache
from tk.tests.checkpoint.saving import llama_table, save_step
from tk.tests.model.architectures import ENTRIES

TABLE = llama_table(layers=1)

NAMES = {  # of architectures that tk does not run, and of old files
    "bert": ("embeddings.word_embeddings.weight", "encoder.layer.0.attn.bias", "pooler.dense.weight"),
    "t5": ("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    "gpt_neox": ("layers.0.attention.rotary_emb.inv_freq", "layers.0.attention.masked_bias", "embed_in.weight"),
    "": ("norm.weight", "layers.0.attn.masked_bias"),
}


def folder_of(path: Path, names: tuple[str, ...], model_type: str) -> Path:
    path.mkdir()
    save_file({name: torch.full((2, 3), float(i)) for i, name in enumerate(names)}, path / "model.safetensors")
    if model_type:
        (path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    return path


@pytest.mark.parametrize("model_type", NAMES)
def test_names_of_other_architectures_come_back_as_they_were(tmp_path: Path, model_type: str) -> None:
    names = NAMES[model_type]
    source = folder_of(tmp_path / "source", names, model_type)
    prepare_export(Checkpoint.open(source), tmp_path / "plain", plain=True).run()
    reshard(source, tmp_path / "tk", layout=Layout())
    prepare_export(Checkpoint.open(tmp_path / "tk"), tmp_path / "again").run()
    wanted = load_file(source / "model.safetensors")
    for out in ("plain", "tk", "again"):
        found = load_file(tmp_path / out / "model-00000.safetensors")
        assert found.keys() == wanted.keys() == set(names)
        assert all(torch.equal(found[name], wanted[name]) for name in names)


@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_a_file_that_changes_after_its_header_was_read_is_refused(tmp_path: Path, how: str) -> None:
    folder = folder_of(tmp_path / "source", ("a.weight", "b.weight"), "t5")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.read("b.weight").numpy().max() == 1.0
    path = folder / "model.safetensors"
    if how == "replaced":
        save_file({name: torch.full((2, 3), 9.0) for name in ("b.weight", "a.weight")}, tmp_path / "new")
        os.replace(tmp_path / "new", path)
    else:
        data = bytearray(path.read_bytes())
        data[-4:] = b"abcd"
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was replaced or changed after its header was read"):
        checkpoint.read("b.weight")
    assert Checkpoint.open(folder).read("b.weight").numpy().max() > 1.0


def test_the_base_models_prefix_stands_before_names_of_our_architectures_only(tmp_path: Path) -> None:
    found = {
        model_type: set(Checkpoint.open(folder_of(tmp_path / model_type, names, model_type)).tensors)
        for model_type, names in {
            "llama": ("norm.weight", "layers.0.rotary_emb.inv_freq"),
            "gpt2": ("wpe.weight", "h.0.attn.bias"),
            "phi": ("norm.weight",),
        }.items()
    }
    assert found == {"llama": {"model.norm.weight"}, "gpt2": {"transformer.wpe.weight"}, "phi": {"norm.weight"}}


def test_reshard_of_an_architecture_that_tk_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source", NAMES["t5"], "t5")
    assert main(["reshard", str(source), str(tmp_path / "whole"), "--tp", "1"]) == 0
    assert set(Checkpoint.open(tmp_path / "whole").tensors) == set(NAMES["t5"])
    capsys.readouterr()
    assert main(["reshard", str(source), str(tmp_path / "cut"), "--tp", "2"]) == 3
    assert "t5" in capsys.readouterr().err
    assert not (tmp_path / "cut").exists()


def test_prefixes_are_those_of_the_architectures_that_tk_runs() -> None:
    assert set(BASE_PREFIXES) == set(architectures())
    for name, entry in ENTRIES.items():
        config = ModelConfig.from_json(entry.make_config().to_dict())
        names = {spec.name for spec in tensor_table(config)} - {"lm_head.weight"}
        assert all(tensor.startswith(BASE_PREFIXES[config.architecture]) for tensor in names), name


def test_an_export_is_read_from_the_hubs_cache(tmp_path: Path) -> None:
    step = save_step(tmp_path / "run", TABLE, Layout(tp=2), side_files={"config.json": b"{}"})
    prepare_export(Checkpoint.open(step), tmp_path / "out").run()
    snapshot = hub_cache(tmp_path / "out", tmp_path / "cache")
    assert (snapshot / "COMMIT").is_symlink()
    found = Checkpoint.open(snapshot)
    assert found.verify().ok
    assert found.config() == {}
    wanted = Checkpoint.open(tmp_path / "out")
    assert found.manifest_sha256 == wanted.manifest_sha256
    reshard(snapshot, tmp_path / "tp2", layout=Layout(tp=2))
    linked = export_links(found, tmp_path / "linked")
    assert not any(path.is_symlink() for path in linked.rglob("*"))
    for path in (tmp_path / "tp2", linked):
        assert Checkpoint.open(path).verify().ok
        for name in wanted.tensors:
            assert torch.equal(Checkpoint.open(path).read(name).torch(), wanted.read(name).torch())
    gone = next((tmp_path / "out").glob("*.safetensors"))
    (snapshot / gone.name).unlink()
    (snapshot / gone.name).symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=r"is a link to \.\./\.\./blobs/gone, which does not exist"):
        Checkpoint.open(snapshot).check()
