"""A tied head that the files hold too is compared with the embedding, and kept if it differs."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tk.checkpoint import Checkpoint, prepare_export, reshard
from tk.cli.main import main
from tk.core.config import parse
from tk.core.errors import ShapeMismatch
from tk.core.layout import Layout
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.loading import load_weights
from tk.model.registry import tensor_table
from tk.model.shape import ModelKeys
from tk.model.stored_config import stored_config
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.tests.model.architectures import ENTRIES, VOCAB
from tk.train.config.initial_model import resolve
from tk.train.config.train_config import TrainConfig
from tk.train.engine.attention import causal_attention

HEAD = "lm_head.weight"


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def with_head(folder: Path, name: str, change: float) -> Path:
    """Writes a tied model whose file has the head too: the embedding, with `change` added to its last row."""
    ENTRIES[name].make(folder)
    tensors = load_file(folder / "model.safetensors")
    [embedding] = [tensor for key, tensor in tensors.items() if key.endswith(("embed_tokens.weight", "wte.weight"))]
    assert HEAD not in tensors
    head = embedding.clone()
    head[-1] += change
    save_file(tensors | {HEAD: head}, folder / "model.safetensors", {"format": "pt"})
    return folder


def expected(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens()).logits
    return logits


def ours(folder: Path, config: ModelConfig) -> torch.Tensor:
    decoder = Decoder(config, LayerContext(ALONE, torch.float32, torch.device("cpu")))
    load_weights(decoder, Checkpoint.open(folder))
    with torch.no_grad():
        return decoder.logits(decoder(tokens(), torch.arange(9).expand(2, 9), causal_attention))[..., :VOCAB]


def shape_of_a_run(folder: Path, runs: Path) -> ModelKeys:
    """Returns the shape of a run whose `[model] init` is `folder`."""
    config = {"model": {"init": str(folder)}, "train": {"seq_len": 8}, "checkpoint": {"dir": str(runs)}}
    return resolve(parse(config, TrainConfig, "test"), "never").keys


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_head_that_differs_is_used_kept_and_trained(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = with_head(tmp_path / "source", name, 0.5)
    wanted = expected(source)
    with caplog.at_level(logging.WARNING):
        config = stored_config(Checkpoint.open(source))
    assert "the two are not tied" in caplog.text
    assert not config.tie_word_embeddings
    torch.testing.assert_close(ours(source, config), wanted, rtol=1e-4, atol=1e-4)
    assert not shape_of_a_run(source, tmp_path / "runs").tie_word_embeddings

    sharded = tmp_path / "tp2"
    assert main(["reshard", str(source), str(sharded), "--tp", "2"]) == 0
    assert (HEAD, "weight") in Checkpoint.open(sharded).chunks
    assert not stored_config(Checkpoint.open(sharded)).tie_word_embeddings
    torch.testing.assert_close(ours(sharded, stored_config(Checkpoint.open(sharded))), wanted, rtol=1e-4, atol=1e-4)
    prepare_export(Checkpoint.open(sharded), tmp_path / "out").run()
    assert torch.equal(expected(tmp_path / "out"), wanted)

    tied = ModelConfig.from_folder(source)
    assert tied.tie_word_embeddings
    with pytest.raises(ShapeMismatch, match=r"stores lm_head\.weight with other values than"):
        ours(source, tied)
    with pytest.raises(ShapeMismatch, match=r"lm_head\.weight, which is not .* would be lost"):
        reshard(source, tmp_path / "lost", layout=Layout(tp=2), table=tensor_table(tied))


def test_a_head_that_is_equal_stays_tied(tmp_path: Path) -> None:
    source = with_head(tmp_path / "source", "qwen2", 0.0)
    config = stored_config(Checkpoint.open(source))
    assert config.tie_word_embeddings
    torch.testing.assert_close(ours(source, config), expected(source), rtol=1e-4, atol=1e-4)
    assert shape_of_a_run(source, tmp_path / "runs").tie_word_embeddings
    reshard(source, tmp_path / "tp2", layout=Layout(tp=2), table=tensor_table(config))
    assert Checkpoint.open(tmp_path / "tp2").aliases == {HEAD: "model.embed_tokens.weight"}
    assert (HEAD, "weight") not in Checkpoint.open(tmp_path / "tp2").chunks


def test_a_missing_head_is_tied_only_if_config_json_ties_it(tmp_path: Path) -> None:
    ENTRIES["qwen2"].make(tmp_path / "tied")
    path = tmp_path / "tied" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tie_word_embeddings"}))
    assert HEAD not in Checkpoint.open(tmp_path / "tied").tensors
    with pytest.raises(ShapeMismatch, match=r"has no tensor lm_head\.weight, which its config\.json requires"):
        ours(tmp_path / "tied", stored_config(Checkpoint.open(tmp_path / "tied")))


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_a_model_of_fewer_layers_than_are_stored_is_refused(name: str, tmp_path: Path) -> None:
    ENTRIES[name].make(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    assert config[layers] > 1
    path.write_text(json.dumps(config | {layers: 1, "layer_types": None}))
    with pytest.raises(ShapeMismatch, match=r"config\.json describes a model without .*1\..*in all.*Correct config"):
        stored_config(Checkpoint.open(tmp_path))
    with pytest.raises(ShapeMismatch, match="describes a model without"):
        shape_of_a_run(tmp_path, tmp_path / "runs")


@pytest.mark.parametrize("name", ["weight_scale", "qweight", "weight.absmax"])
def test_weights_that_are_quantized_without_a_word_in_config_json_are_refused(name: str, tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path)
    added = {f"model.layers.0.mlp.up_proj.{name}": torch.ones(1)}
    save_file(load_file(tmp_path / "model.safetensors") | added, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ShapeMismatch, match=rf"{name}, so its weights are quantized\. Name the folder of the model that"
    ):
        stored_config(Checkpoint.open(tmp_path))


def test_keys_without_the_effect_that_they_promise_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ENTRIES["llama3"].make(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"rope_scaling": {"type": "default"}, "logit_scale": 2.0})
    )
    with caplog.at_level(logging.WARNING):
        assert stored_config(Checkpoint.open(tmp_path)).rope_theta == 10000.0
    assert "config.json sets logit_scale, which tk does not know and ignores" in caplog.text
    assert "rope_scaling replaces rope_parameters, as in transformers, and its rope_theta = 5000.0" in caplog.text
