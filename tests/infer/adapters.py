"""Low-rank adapters of random values as steps, and the logits that training's modules find with them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tk.checkpoint import Checkpoint, NewStep, RunFolder, commit, write_part
from tk.checkpoint.format.adapter_record import AdapterRecord, BaseRecord
from tk.core.casts import Array, cast
from tk.core.dtypes import FP32, by_code
from tk.core.layout import Layout
from tk.core.ownership import owned
from tk.core.tensors import with_slots
from tk.model.decoder import Decoder
from tk.model.lora.options import LoraOptions
from tk.model.lora.peft_config import to_peft
from tk.model.lora.table import with_adapters
from tk.model.registry import decoder_spec
from tk.model.stored_adapter import StoredAdapter, base_identity
from tk.model.stored_config import stored_config
from tk.parallel.collectives import all_gather_dim
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.train.engine.attention import causal_attention

# What an adapter of an architecture of the tests may hold of its own beside factors.
OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama3": {"modules_to_save": ("norm", "lm_head")},
        "gpt2": {"modules_to_save": ("ln_1", "ln_f"), "bias": "all"},
        "gpt2 untied": {"modules_to_save": ("ln_2", "lm_head"), "bias": "lora_only"},
        "qwen2": {"modules_to_save": ("post_attention_layernorm",), "bias": "lora_only"},
        "qwen3": {"modules_to_save": ("q_norm", "k_norm", "lm_head")},
        "mistral": {"modules_to_save": ("lm_head",)},
        "mixtral": {"modules_to_save": ("norm", "lm_head")},
        "qwen2_moe": {
            "targets": ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj"),
            "modules_to_save": ("norm",),
            "bias": "lora_only",
        },
        "qwen3_moe": {"modules_to_save": ("q_norm",)},
        "glm4_moe": {"modules_to_save": ("lm_head",), "bias": "all"},
    }
)
Change = Callable[[str, Array], Array]  # a tensor's name and values -> other values


def make_adapter(
    run: Path,
    base: Path,
    seed: int = 0,
    code: str = "F32",
    identity: str | None = None,
    step: int = 1,
    change: Change = lambda name, values: values,
    **options: Any,
) -> Path:
    """Saves a step with an adapter of a model, whose products are about as large as a tenth of those of its weights.

    Norms and biases of its own are about 1.

    Args:
        run: the run folder.
        base: the folder of the model.
        seed: that of the values.
        code: the dtype of the factors.
        identity: that of the base; None = the right one.
        step: the number of the step.
        change: changes values before they are saved.
        options: the fields of LoraOptions; alpha is 4 by default.
    """
    checkpoint, lora = Checkpoint.open(base), LoraOptions(**{"alpha": 4.0} | options)
    config = stored_config(checkpoint)
    record = BaseRecord(base_identity(checkpoint, config) if identity is None else identity, str(base), "fp32")
    table = with_slots(with_adapters(decoder_spec(config), lora).table, {"weight": code})
    stored = tuple(spec for spec in table if spec.stored)
    shapes = {spec.name: spec.shape for spec in stored}

    def values(name: str) -> Array:
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shapes[name], np.float32)
        small = drawn * np.float32(0.5 / np.sqrt(shapes[name][-1]))
        found = change(name, small + np.float32(len(shapes[name]) == 1))
        return cast(found, FP32, by_code(code)).reshape(-1)

    with RunFolder(run).lock() as locked:
        folder = locked.begin_step(step)
        items = owned(stored, Layout(), 0)
        write_part(folder, 0, stored, [(item, code, partial(values, item.tensor)) for item in items])
        return commit(locked, NewStep(step, stored, Layout(), adapter=AdapterRecord(to_peft(lora), record)))


def trained_logits(base: Path, adapter: Path | None, tokens: Sequence[int], tp: Group = ALONE) -> Array:
    """Returns the logits of training's decoder with an adapter, or without one: fp32 [tokens, vocabulary].

    With `tp` every rank of the group calls it, and gets the logits of all ranks.
    """
    checkpoint, context = Checkpoint.open(base), LayerContext(tp, torch.float32, torch.device("cpu"))
    config, factors = stored_config(checkpoint), None if adapter is None else Checkpoint.open(adapter)
    spec = decoder_spec(config) if factors is None else StoredAdapter.of(factors).decoder(config)
    decoder = Decoder(config, context, spec=spec)
    for local in decoder.local_params():
        values = decoder.get_parameter(local.name).data.view(-1).zero_()
        for piece in local.pieces:
            source = checkpoint if factors is None or piece.tensor.name not in factors.tensors else factors
            read = source.read(piece.tensor.alias or piece.tensor.name, piece.box, dtype=FP32).torch()
            values[piece.start : piece.start + piece.box.size] = read.reshape(-1)
    with torch.no_grad():
        hidden = decoder(torch.tensor([tokens]), torch.arange(len(tokens))[None], causal_attention)
        logits: Array = all_gather_dim(decoder.logits(hidden), -1, tp)[0, :, : config.vocab_size].numpy()
        return logits


def scores(logits: Array, tokens: Sequence[int]) -> Array:
    """Returns the log-probability of each token after the first, in fp64, from the logits of all of them."""
    wide = torch.from_numpy(logits).double()[:-1].log_softmax(-1)
    found: Array = wide.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1).numpy()
    return found


def trained_scores(base: str, adapter: str, tokens: list[int]) -> list[float]:
    """Returns the scores of training's decoder over all ranks of a pool as tensor-parallel ranks; each calls it."""
    num_kv_heads = stored_config(Checkpoint.open(base)).num_key_value_heads
    mesh = Mesh.build(Layout(tp=torch.distributed.get_world_size()), num_kv_heads=num_kv_heads)
    found: list[float] = scores(trained_logits(Path(base), Path(adapter), tokens, mesh.tp), tokens).tolist()
    return found
