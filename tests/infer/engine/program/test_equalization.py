"""The factors of keys: those of numpy from a model's own tensors, on every architecture and at every tp."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.shared_read import ALONE, Peers
from tk.core.casts import Array
from tk.core.dtypes import by_name
from tk.infer.engine.program.equalization import MOST_DOUBLINGS, KeyEqualizer
from tk.infer.engine.program.lower import lower
from tk.infer.engine.program.weights import load_params
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.tests.model.architectures import ENTRIES

Model = TypeVar("Model", LlamaForCausalLM, MistralForCausalLM)


def found(folder: Path, dtype: str = "fp32", tp: int = 1, rank: int = 0, peers: Peers = ALONE) -> list[Array]:
    """Returns the factors of every layer on a rank."""
    checkpoint = Checkpoint.open(folder)
    spec = decoder_spec(stored_config(checkpoint))
    program = lower(spec, tp, rank)
    equalizer = KeyEqualizer(program, by_name(dtype))
    load_params(program.params, spec.table, checkpoint, by_name(dtype), equalizer.take)
    factors = equalizer.factors(peers)
    return [factors[layer] for layer in range(program.num_layers)]


def gatherer(size: int) -> Callable[[int, bytes], list[bytes]]:
    """Returns the exchange between ranks that are threads."""
    given: dict[int, bytes] = {}
    barrier = Barrier(size, timeout=60)

    def gather(rank: int, mine: bytes) -> list[bytes]:
        given[rank] = mine
        barrier.wait()
        return [given[each] for each in range(size)]

    return gather


def expected(model: PreTrainedModel) -> list[Array]:
    """Returns the factors of every layer, from the tensors of `transformers`."""
    tensors = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    if model.config.model_type == "gpt2":
        dim = model.config.n_embd // model.config.n_head
        return [_of_gpt2(tensors, f"transformer.h.{i}.", dim) for i in range(model.config.n_layer)]
    return [_of_llama(tensors, f"model.layers.{i}.", model) for i in range(model.config.num_hidden_layers)]


def _of_gpt2(tensors: dict[str, Array], prefix: str, dim: int) -> Array:
    gain = np.mean(tensors[f"{prefix}ln_1.weight"] ** 2)
    squares = (tensors[f"{prefix}attn.c_attn.weight"] ** 2).sum(0) * gain + tensors[f"{prefix}attn.c_attn.bias"] ** 2
    queries, keys, _ = np.split(squares, 3)
    return np.asarray(2.0 ** np.round(np.log2(np.sqrt(np.sqrt(keys / queries))))).reshape(-1, dim)


def _of_llama(tensors: dict[str, Array], prefix: str, model: PreTrainedModel) -> Array:
    dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    gain, sizes = np.mean(tensors[f"{prefix}input_layernorm.weight"] ** 2), []
    for kind in "qk":
        name = f"{prefix}self_attn.{kind}_"
        squares = (tensors[f"{name}proj.weight"] ** 2).sum(1) * gain
        squares = (squares + tensors.get(f"{name}proj.bias", np.zeros(1)) ** 2).reshape(-1, dim)
        if f"{name}norm.weight" in tensors:
            squares = squares / squares.mean(1, keepdims=True) * tensors[f"{name}norm.weight"] ** 2
        half = int(dim * model.config.rope_parameters.get("partial_rotary_factor", 1)) // 2
        pairs = squares[:, :half] + squares[:, half : 2 * half]
        sizes.append(np.concatenate([pairs, pairs, squares[:, 2 * half :]], axis=1))
    queries = sizes[0].reshape(len(sizes[1]), -1, dim).mean(1)
    return np.asarray(2.0 ** np.round(np.log2(np.sqrt(np.sqrt(sizes[1] / queries)))))


def make_uneven(name: str, folder: Path) -> PreTrainedModel:
    """Saves a model of the tests whose queries and keys have channels of very different sizes, and returns it."""
    model = ENTRIES[name].make(folder)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(f".{kind}." in path for kind in ("q_proj", "k_proj", "c_attn", "q_norm", "k_norm")):
                across = parameter.ndim > 1 and "c_attn" not in path  # of GPT-2 a column is a channel
                sizes = torch.exp2(2 * torch.randn(parameter.shape[0 if across else -1], generator=draw))
                parameter *= sizes[:, None] if across else sizes
    model.save_pretrained(folder)
    return model


def scale_keys(model: Model, pairs: tuple[int, ...], factor: float) -> Model:
    """Multiplies pairs of every kv head's keys by a factor, divides those of its queries, and returns the model."""
    half = (model.config.head_dim or model.config.hidden_size // model.config.num_attention_heads) // 2
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, by in ((layer.self_attn.k_proj, factor), (layer.self_attn.q_proj, 1 / factor)):
                for pair in pairs:
                    projection.weight.view(-1, 2, half, projection.in_features)[:, :, pair] *= by
    return model


@pytest.mark.parametrize("name", list(ENTRIES))
def test_they_are_those_of_numpy(tmp_path: Path, name: str) -> None:
    model = make_uneven(name, tmp_path)
    factors = found(tmp_path)
    assert len(np.unique(factors)) > 2, "the case must differ from no factors"
    for one, other in zip(factors, expected(model), strict=True):
        assert one.dtype == np.float32
        assert np.array_equal(one, other)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "gpt2"])
def test_they_are_the_same_at_every_tp(tmp_path: Path, name: str, dtype: str) -> None:
    """With tp 4 and 8 the query heads of a kv head are on several ranks."""
    make_uneven(name, tmp_path)
    whole = found(tmp_path, dtype)
    for tp in (2, 4, 8):
        gather = gatherer(tp)
        with ThreadPoolExecutor(tp) as pool:
            ranks = [
                pool.submit(found, tmp_path, dtype, tp, rank, Peers(rank, tp, partial(gather, rank)))
                for rank in range(tp)
            ]
            parts = [rank.result() for rank in ranks]
        for layer, factors in enumerate(whole):
            repeated = np.concatenate([part[layer] for part in parts])
            assert np.array_equal(repeated, factors.repeat(len(repeated) // len(factors), axis=0)), (tp, layer)


def test_outliers_change_them_by_their_own_factor(tmp_path: Path) -> None:
    """So the keys that are rounded are the same bits as without outliers."""
    model = ENTRIES["llama3"].make(tmp_path / "plain")
    assert isinstance(model, LlamaForCausalLM)
    scale_keys(model, (1, 3), 8.0)
    model.save_pretrained(tmp_path / "outliers")
    changes = np.stack(found(tmp_path / "outliers")) / np.stack(found(tmp_path / "plain"))
    assert set(np.unique(changes[..., [1, 3, 5, 7]])) == {8.0}
    assert set(np.unique(np.delete(changes, [1, 3, 5, 7], axis=-1))) == {1.0}


@pytest.mark.parametrize(("size", "factor"), [(0.0, 1.0), (float("nan"), 1.0), (1e30, 2.0**MOST_DOUBLINGS)])
def test_channels_without_a_size_keep_theirs_and_factors_have_bounds(
    tmp_path: Path, size: float, factor: float
) -> None:
    model = ENTRIES["llama3"].make(tmp_path)
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[[2, 6]] *= size
    model.save_pretrained(tmp_path)
    assert found(tmp_path)[1][0, [2, 6]].tolist() == [factor, factor]
