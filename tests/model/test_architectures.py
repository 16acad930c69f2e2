"""Every architecture against `transformers` on the same random weights, fp32: logits, gradients, and round trips.

A new architecture needs nothing here but an entry of `architectures.ENTRIES`.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tk.checkpoint import Checkpoint, prepare_export, reshard
from tk.core.layout import Layout
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.loading import load_weights
from tk.model.registry import architectures, tensor_table
from tk.parallel.collectives import all_gather
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.tests.model.architectures import ENTRIES, LENGTH, VOCAB
from tk.tests.model.decoders import whole_loss
from tk.tests.rank_pool import RankPool
from tk.train.engine.attention import causal_attention

CPU = torch.device("cpu")
SIMILAR = ("mistral", "qwen2", "qwen3")  # to those that make test saves and reshards


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _load(folder: Path, tp: Group) -> Decoder:
    config = ModelConfig.from_json(Checkpoint.open(folder).config())
    decoder = Decoder(config, LayerContext(tp, torch.float32, CPU))
    load_weights(decoder, Checkpoint.open(folder))
    return decoder


def _logits(decoder: Decoder) -> torch.Tensor:
    tokens = _tokens()
    positions = torch.arange(LENGTH).expand_as(tokens)
    with torch.no_grad():
        local = decoder.logits(decoder(tokens, positions, causal_attention))
    return torch.cat(all_gather(local, decoder.tp), dim=-1)[..., :VOCAB]


def _expected(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(_tokens()).logits
    return logits.contiguous()


def compare_at_tp(folder: str, expected: str) -> float:
    """Returns the largest |difference| / (1 + |logit|) of the gathered logits from those of `transformers`."""
    size = torch.distributed.get_world_size()
    mesh = Mesh.build(Layout(tp=size), size)
    reference = load_file(expected)["logits"]
    return float(((_logits(_load(Path(folder), mesh.tp)) - reference).abs() / (1 + reference.abs())).max())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in SIMILAR else ()) for name in ENTRIES]
)
def test_logits_equal_transformers_and_survive_the_way_there_and_back(
    tmp_path: Path, rank_pool: RankPool, name: str
) -> None:
    """Loads a saved model at tp 1 and 2, reshards it to tp 2, loads that, and exports it: weights keep their bits."""
    source, sharded, exported = (tmp_path / part for part in ("source", "sharded", "exported"))
    model = ENTRIES[name].make(source)
    expected = _expected(model)
    assert expected.abs().max() > 1, "the logits must be large enough to show a difference"
    torch.testing.assert_close(_logits(_load(source, ALONE)), expected, rtol=1e-5, atol=1e-5)

    save_file({"logits": expected}, tmp_path / "expected.safetensors")
    reshard(source, sharded, layout=Layout(tp=2), table=tensor_table(ModelConfig.from_folder(source)))
    for folder in (source, sharded):
        arguments = {"folder": str(folder), "expected": str(tmp_path / "expected.safetensors")}
        assert max(rank_pool.run(compare_at_tp, 2, **arguments)) < 1e-5

    prepare_export(Checkpoint.open(sharded), exported).run()
    back = AutoModelForCausalLM.from_pretrained(exported).eval()
    for (key, value), (other, wanted) in zip(back.state_dict().items(), model.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(value, wanted), key
    # Where a file puts a weight in memory can change the last bits of a product with few rows.
    torch.testing.assert_close(_expected(back), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ENTRIES)
def test_gradients_equal_transformers(tmp_path: Path, name: str) -> None:
    model = ENTRIES[name].make(tmp_path)
    decoder = _load(tmp_path, ALONE)
    tokens = _tokens()
    loss = whole_loss(decoder, tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    model(tokens, labels=tokens).loss.backward()
    # transformers stacks experts into one tensor in memory, and saves them under the names of our table.
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            assert gradients[key] is not None, key
            parameter.copy_(gradients[key])
    model.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients" / "model.safetensors")
    for local in decoder.local_params():
        gradient = decoder.get_parameter(local.name).grad
        if not local.trainable:
            assert gradient is None, local.name
            continue
        assert gradient is not None, local.name
        for piece in local.pieces:
            mine = gradient.reshape(-1)[piece.start : piece.start + piece.box.size].view(piece.box.shape)
            wanted = expected[piece.tensor.name]
            assert ((mine - wanted).abs() <= 1e-6 + 1e-4 * wanted.abs()).all(), piece.tensor.name


@pytest.mark.parametrize("name", ENTRIES)
def test_config_survives_there_and_back(tmp_path: Path, name: str) -> None:
    """tk must read the config of transformers and its own, and transformers must read that of tk."""
    ENTRIES[name].make(tmp_path)
    expected = _expected(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    config = ModelConfig.from_folder(tmp_path)
    assert ModelConfig.from_json(config.to_json()) == config
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert torch.equal(_expected(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), expected)


def test_every_architecture_has_an_entry() -> None:
    assert set(architectures()) == {entry.config.model_type for entry in ENTRIES.values()}
