"""Stages of a small Llama on any pipeline rank, made in one process without the other ranks."""

from typing import Any

import numpy as np
import torch

from tk.core.layout import Layout
from tk.core.local_params import LocalParam
from tk.core.places import Coordinates
from tk.core.tensors import Table
from tk.data.batches import MicroBatch
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.init import fill_initial
from tk.model.registry import decoder_spec
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.parallel.weight_grads import WeightGradQueue
from tk.train.engine.stages import build_stages

VOCAB, LENGTH, HIDDEN = 37, 6, 16
CPU = torch.device("cpu")


def make_config(**changes: Any) -> ModelConfig:
    """Returns a Llama of four layers."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LENGTH,
    }
    return ModelConfig(**shape | changes)


def make_mesh(layout: Layout, pp: int = 0) -> Mesh:
    """Returns the mesh of pipeline rank `pp`; the other ranks do not exist."""
    pipeline = Group(None, pp, layout.pp) if layout.pp > 1 else ALONE
    return Mesh(layout, Coordinates(pp, 0, 0, 0), ALONE, pipeline, ALONE, ALONE, ALONE)


def make_stages(
    config: ModelConfig, mesh: Mesh, weight_grads: WeightGradQueue | None = None
) -> tuple[Table, tuple[Decoder, ...]]:
    """Returns the model's table and this rank's stages on the meta device."""
    spec = decoder_spec(config)
    queue = weight_grads or WeightGradQueue()
    stages = build_stages(
        config, spec, mesh, torch.float32, sequence_parallel=False, weight_grads=queue, recompute="none"
    )
    return spec.table, stages


def fill(local: LocalParam, parameter: torch.Tensor) -> None:
    """Writes the initial values of seed 5."""
    fill_initial(local, parameter, 5, 0.2)


def micro_batch(seed: int) -> MicroBatch:
    """Returns two rows of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (2, LENGTH + 1))
    return MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
