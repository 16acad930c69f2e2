"""The weight files of a Hugging Face folder: those that `transformers` would read, or an error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError


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
