"""Decoders of every architecture with initial weights, and their gradients by logical tensor, to compare with."""

from typing import Any

import torch

from tk.core.geometry import Box
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.init import initialize_weights
from tk.parallel.cross_entropy import vocab_parallel_cross_entropy
from tk.parallel.mesh import Group
from tk.tests.model.architectures import ENTRIES, VOCAB

CPU = torch.device("cpu")
BATCH, LENGTH = 2, 16
Gradients = dict[tuple[str, Box], torch.Tensor]


def config_of(name: str, **changes: Any) -> ModelConfig:
    """The config of an entry, changed."""
    return ModelConfig.from_json(ENTRIES[name].make_config().to_dict() | changes)


def build(config: ModelConfig, tp: Group, **options: Any) -> Decoder:
    """A decoder with the initial weights of seed 3."""
    decoder = Decoder(config, tp, dtype=torch.float32, device=CPU, **options)
    initialize_weights(decoder, seed=3)
    return decoder


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, their positions and targets, [B, L] each."""
    drawn = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], torch.arange(LENGTH).expand(BATCH, LENGTH), drawn[:, 1:]


def loss_of(decoder: Decoder, hidden_BLD: torch.Tensor) -> torch.Tensor:
    """The mean loss on the targets, from the last stage's hidden states."""
    logits = decoder.logits(hidden_BLD).flatten(0, 1)
    return vocab_parallel_cross_entropy(logits, tokens()[2].flatten(), VOCAB, decoder.tp).mean()


def gradients(decoder: Decoder) -> Gradients:
    """This rank's gradient of every piece of every parameter, by tensor and box."""
    found = {}
    for local in decoder.local_params():
        gradient = decoder.get_parameter(local.name).grad
        assert gradient is not None, local.name
        for piece in local.pieces:
            part = gradient.reshape(-1)[piece.start : piece.start + piece.box.size]
            found[piece.tensor.name, piece.box] = part.view(piece.box.shape)
    return found
