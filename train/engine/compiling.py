"""torch.compile for a decoder's layers, each compiled for itself: layers of a kind share one program.

Of the loss, the steps that read the logits of a block are compiled, between products and sums over ranks.
Code that communicates, defers gradients, branches on values or widens codes is not compiled; the code between is.
Only a run with `[train] compile` calls this module: the compiler takes seconds to import.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ...core.errors import ConfigError
from ...model.attention import Attention
from ...model.decoder import Decoder, DecoderLayer
from ...model.experts.mixture import MixtureOfExperts
from ...model.mlp import GatedMLP, PlainMLP
from ...parallel.head_loss import LossSteps, exponential_sums, overwrite_by_gradient
from ...parallel.layers import ColumnParallelLinear, RowParallelLinear
from ..config.extras import missing_for_compile
from ..config.train_config import TrainConfig


def compile_layers(decoders: Sequence[Decoder], config: TrainConfig, device: torch.device) -> None:
    """Compiles every layer, and the steps of the loss, at their first forward pass.

    Raises:
        ConfigError: this machine has no compiler.
    """
    _check_compiler(device)
    outside: list[type[nn.Module]] = [MixtureOfExperts]
    if config.data.packing == "documents" or config.parallel.cp > 1:  # their lengths differ, or it communicates
        outside.append(Attention)
    if config.recompute.mlp_block:
        outside += [GatedMLP, PlainMLP]
    deferred = config.parallel.schedule == "zb-h1" or config.recompute.mode == "selective"
    coded = config.lora is not None and config.lora.base != "auto"
    if config.parallel.tp > 1 or deferred or coded:
        outside += [ColumnParallelLinear, RowParallelLinear]
    steps = LossSteps(
        torch.compile(exponential_sums, dynamic=False), torch.compile(overwrite_by_gradient, dynamic=False)
    )
    for decoder in decoders:
        for module in decoder.modules():
            if isinstance(module, tuple(outside)):
                module.forward = torch.compiler.disable(module.forward)
        for layer in decoder.model.layers.values():
            assert isinstance(layer, DecoderLayer)
            layer.compute = torch.compile(layer.compute, dynamic=False)  # type: ignore[method-assign]
        if decoder.lm_head is not None:
            decoder.lm_head.loss_steps = steps


def _check_compiler(device: torch.device) -> None:
    missing = missing_for_compile() if device.type == "cpu" else ""
    if missing:
        raise ConfigError(
            f"[train] compile = true cannot be done here: {missing}. Install it (Debian: apt install g++ python3-dev), "
            "name a compiler in CXX, or set train.compile = false."
        )
