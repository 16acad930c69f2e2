"""Llama against `transformers.LlamaForCausalLM` on the same random weights, fp32, at tp 1, 2 and 4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import ParallelError, ShapeMismatch
from tk.core.layout import Layout
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.init import initialize_weights
from tk.model.loading import load_weights
from tk.parallel.collectives import all_gather
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.tests.model.decoders import whole_loss
from tk.tests.rank_pool import RankPool
from tk.train.engine.attention import causal_attention

CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {
    "untied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "grouped": {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 24},
}


def _reference(folder: Path, name: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=101,  # no tp divides it
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.2,
        **SHAPES[name],
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def _tokens() -> torch.Tensor:
    return torch.randint(0, 101, (2, 33), generator=torch.Generator().manual_seed(1))


def _load(folder: Path, tp: Group) -> Decoder:
    decoder = Decoder(ModelConfig.from_folder(folder), LayerContext(tp, torch.float32, CPU))
    load_weights(decoder, Checkpoint.open(folder))
    return decoder


def _logits(decoder: Decoder) -> torch.Tensor:
    tokens = _tokens()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        local = decoder.logits(decoder(tokens, positions, causal_attention))
    return torch.cat(all_gather(local, decoder.tp), dim=-1)[..., :101]


def compare_at_tp(folder: str, expected: str) -> float:
    """Returns the largest difference of the gathered logits from the stored ones."""
    size = torch.distributed.get_world_size()
    config = ModelConfig.from_folder(Path(folder))
    mesh = Mesh.build(Layout(tp=size), config.num_key_value_heads)
    reference = load_file(expected)["logits"]
    return float((_logits(_load(Path(folder), mesh.tp)) - reference).abs().max())


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    reference = _reference(tmp_path, name)
    with torch.no_grad():
        expected = reference(_tokens()).logits
    decoder = _load(tmp_path, ALONE)
    torch.testing.assert_close(_logits(decoder), expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 1, "the logits must be large enough to show a difference"


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, world_size, marks=pytest.mark.matrix if world_size == 2 and name != "grouped" else ())
        for name in ("untied", "grouped", "tied")
        for world_size in (2, 4)
    ],
)
def test_logits_equal_transformers_at_tp(tmp_path: Path, rank_pool: RankPool, name: str, world_size: int) -> None:
    reference = _reference(tmp_path / "model", name)
    with torch.no_grad():
        expected = reference(_tokens()).logits.contiguous()
    save_file({"logits": expected}, tmp_path / "expected.safetensors")
    differences = rank_pool.run(
        compare_at_tp,
        world_size,
        folder=str(tmp_path / "model"),
        expected=str(tmp_path / "expected.safetensors"),
    )
    assert max(differences) < 1e-5


def test_gradients_equal_transformers(tmp_path: Path) -> None:
    reference = _reference(tmp_path, "grouped")
    decoder = _load(tmp_path, ALONE)
    tokens = _tokens()
    loss = whole_loss(decoder, tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    expected = reference(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach().double(), rtol=1e-6, atol=1e-6)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for local in decoder.local_params():
        gradient = decoder.get_parameter(local.name).grad
        assert gradient is not None
        for piece in local.pieces:
            mine = gradient.reshape(-1)[piece.start : piece.start + piece.box.size].view(piece.box.shape)
            torch.testing.assert_close(mine, gradients[piece.tensor.name], rtol=1e-4, atol=1e-6)


def collect_initial_weights(config: dict[str, Any]) -> dict[str, list[float]]:
    """Returns this rank's pieces after initialisation, each with its bounds."""
    size = torch.distributed.get_world_size()
    model = ModelConfig.model_validate(config)
    mesh = Mesh.build(Layout(tp=size), model.num_key_value_heads)
    decoder = Decoder(model, LayerContext(mesh.tp, torch.float32, CPU))
    initialize_weights(decoder, seed=5)
    return {
        f"{piece.tensor.name} {piece.box.bounds()}": decoder.get_parameter(local.name)
        .detach()
        .view(-1)[piece.start : piece.start + piece.box.size]
        .tolist()
        for local in decoder.local_params()
        for piece in local.pieces
    }


def test_every_tp_starts_from_the_same_weights(rank_pool: RankPool) -> None:
    shape = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = shape | {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = ModelConfig.model_validate(config)
    whole = Decoder(model, LayerContext(ALONE, torch.float32, CPU))
    initialize_weights(whole, seed=5)
    tensors = {}
    for local in whole.local_params():
        for piece in local.pieces:
            flat = whole.get_parameter(local.name).detach().view(-1)
            tensors[piece.tensor.name] = flat[piece.start : piece.start + piece.box.size].view(piece.box.shape)
    assert 0.018 < tensors["lm_head.weight"].std() < 0.022
    for rank in rank_pool.run(collect_initial_weights, 4, config=config):
        assert rank
        for key, values in rank.items():
            name, bounds = key.split(" ", 1)
            index = tuple(slice(low, high) for low, high in json.loads(bounds))
            assert tensors[name][index].reshape(-1).tolist() == values, key


def test_indivisible_tp_names_formula_and_fix() -> None:
    config = ModelConfig.model_validate({"vocab_size": 32, "num_attention_heads": 4})
    with pytest.raises(ParallelError, match=r"num_attention_heads % tp = 4 % 3 = 1.*fits tp = 1 or 2 or 4"):
        Decoder(config, LayerContext(Group(None, 0, 3), torch.float32, CPU))


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    _reference(tmp_path, "untied")
    config = ModelConfig.from_folder(tmp_path).model_copy(update={"intermediate_size": 100})
    decoder = Decoder(config, LayerContext(ALONE, torch.float32, CPU))
    with pytest.raises(ShapeMismatch, match=r"gate_proj\.weight has shape \[96, 64\].*\[100, 64\]"):
        load_weights(decoder, Checkpoint.open(tmp_path))
