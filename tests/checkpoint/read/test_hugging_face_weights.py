"""The weight files of a Hugging Face folder: those that `transformers` would read, or an error."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint, prepare_export
from tk.core.errors import CheckpointError, ManifestError
from tk.model.stored_config import stored_config
from tk.tests.model.tiny_llama import TINY_LLAMA


def test_a_single_file_counts_before_an_index(tmp_path: Path) -> None:
    """As in a folder that one model was saved into after another; transformers loads the single file."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8,
    )  # fmt: skip
    first, second = BertModel(config), BertModel(config)
    first.save_pretrained(tmp_path / "model", max_shard_size="1kB")
    parts = {path.name: path.read_bytes() for path in (tmp_path / "model").glob("model*")}
    second.save_pretrained(tmp_path / "model")
    for name, data in parts.items():
        (tmp_path / "model" / name).write_bytes(data)
    loaded = BertModel.from_pretrained(tmp_path / "model").state_dict()
    found = Checkpoint.open(tmp_path / "model")
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(loaded[name], second.state_dict()[name])
    assert torch.equal(found.read(name).torch(), loaded[name])


def test_tensors_that_an_index_forgets_or_puts_elsewhere(tmp_path: Path) -> None:
    """transformers reads the files that an index names whole, whatever it says is in them."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "model", max_shard_size="1kB")
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    forgotten = "embeddings.LayerNorm.weight"
    first, last = index["weight_map"].pop(forgotten), max(index["weight_map"].values())
    assert first in index["weight_map"].values()
    assert first < last
    path.write_text(json.dumps(index))
    loaded = BertModel.from_pretrained(tmp_path / "model").state_dict()
    found = Checkpoint.open(tmp_path / "model")
    assert found.tensors.keys() == loaded.keys()
    assert torch.equal(found.read(forgotten).torch(), loaded[forgotten])

    tensors = load_file(tmp_path / "model" / last)
    save_file(tensors | {forgotten: torch.full((8,), 7.0)}, tmp_path / "model" / last, {"format": "pt"})
    index["weight_map"][forgotten] = first
    path.write_text(json.dumps(index))
    assert BertModel.from_pretrained(tmp_path / "model").state_dict()[forgotten][0] == 7
    with pytest.raises(CheckpointError, match=rf"says that {forgotten} is in {first}, and {last} holds one"):
        Checkpoint.open(tmp_path / "model")


def model_of(folder: Path, tied: bool = False) -> dict[str, torch.Tensor]:
    """Saves a small Llama in several files; returns its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, tie_word_embeddings=tied))
    model.save_pretrained(folder, max_shard_size="20kB")
    return dict(model.state_dict())


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import LlamaForCausalLM

    found: Any = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = found
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.state_dict())


def test_an_index_may_name_files_in_folders_below(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    wanted = model_of(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    (folder / "sub" / "deeper").mkdir(parents=True)
    for number, name in enumerate(sorted(set(index["weight_map"].values()))):
        moved = f"{('', 'sub/', 'sub/deeper/')[number % 3]}{name}"
        (folder / name).rename(folder / moved)
        index["weight_map"] = {key: moved if file == name else file for key, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    found = Checkpoint.open(folder)
    assert found.tensors.keys() == wanted.keys()
    theirs = loaded(folder)
    for name in wanted:
        assert torch.equal(found.read(name).torch(), theirs[name])
    prepare_export(found, tmp_path / "out").run()
    assert torch.equal(loaded(tmp_path / "out")["lm_head.weight"], wanted["lm_head.weight"])
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(next(folder.glob("sub/*.safetensors")).read_bytes())
    for escape in ("../outside.safetensors", "sub/../../outside.safetensors", str(outside), "sub//x", "a/b/c/d/e"):
        index["weight_map"]["lm_head.weight"] = escape
        path.write_text(json.dumps(index))
        with pytest.raises(ManifestError, match="is not a plain file name"):
            Checkpoint.open(folder)


def test_a_tied_model_that_stores_only_its_head(tmp_path: Path) -> None:
    """`transformers` ties whichever of the two is missing to the other one."""
    folder, embedding = tmp_path / "model", "model.embed_tokens.weight"
    wanted = model_of(folder, tied=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = folder / index["weight_map"].pop(embedding)
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop(embedding)
    save_file(tensors, file, {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = file.name
    path.write_text(json.dumps(index))
    theirs = loaded(folder)
    assert torch.equal(theirs[embedding], wanted[embedding])
    found = Checkpoint.open(folder)
    assert found.aliases == {"lm_head.weight": embedding}
    for name in wanted:
        assert torch.equal(found.read(name).torch(), theirs[name]), name
    assert stored_config(found).tie_word_embeddings
    prepare_export(found, tmp_path / "out").run()
    assert torch.equal(loaded(tmp_path / "out")["lm_head.weight"], wanted[embedding])
    assert torch.equal(Checkpoint.open(tmp_path / "out").read(embedding).torch(), wanted[embedding])
