"""The declarations of every architecture agree with each other."""

import subprocess
import sys

import pytest

from tk.core.tensors import TensorSpec
from tk.model.config import ModelConfig
from tk.model.registry import architectures, decoder_spec
from tk.model.shape import ModelShape
from tk.model.spec import EMBEDDING, HEAD, POSITIONS, Architecture, DecoderSpec, DenseSpec, LayerSpec, Rope
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import config_of


@pytest.mark.parametrize("name", ENTRIES)
def test_a_table_has_the_tensors_that_the_description_uses(name: str) -> None:
    config = config_of(name)
    spec = decoder_spec(config)
    params = {tensor.param or tensor.name for tensor in spec.table}
    assert {EMBEDDING, HEAD} <= params
    assert (POSITIONS in params) == (spec.rope is None), "positions are either learned or rotated"
    assert len(spec.layers) == config.num_hidden_layers
    assert {tensor.layer for tensor in spec.table} == {"first", "last", *range(len(spec.layers))}
    names = [tensor.name for tensor in spec.table]
    assert len(set(names)) == len(names)
    tied = [tensor for tensor in spec.table if tensor.alias]
    assert len(tied) == config.tie_word_embeddings
    assert all(tensor.alias in names for tensor in tied)


@pytest.mark.parametrize("architecture", architectures().values(), ids=lambda architecture: architecture.name)
def test_an_architecture_names_fields_of_a_shape(architecture: Architecture) -> None:
    fields = set(ModelShape.model_fields)
    assert architecture.options <= fields
    assert set(architecture.keys) <= fields
    assert not set(architecture.requires) & fields, "a key with one value is no option"
    config = ModelConfig(architecture=architecture.name, vocab_size=101)
    written = config.to_json()
    assert written["model_type"] == architecture.name
    assert {key: written[key] for key in architecture.requires} == dict(architecture.requires)


def test_an_architecture_adds_nothing_by_default() -> None:
    layer = LayerSpec(DenseSpec(8))
    spec = DecoderSpec((TensorSpec(EMBEDDING, (3, 4)),), 4, 2, 2, 2, (layer,), 1e-5, rope=Rope(1e4))
    plain = Architecture("plain", "PlainForCausalLM", frozenset(), lambda config: spec)
    data = {"hidden_size": 4}
    assert plain.read(data) == data
    assert plain.read(data) is not data, "the caller's keys are not changed"
    assert plain.write(ModelShape(vocab_size=1)) == {}
    assert (layer.window, spec.norm, spec.transposed) == (None, "rms", False)


def test_descriptions_load_no_torch() -> None:
    code = "import sys, tk.model.registry as r; r.architectures(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
