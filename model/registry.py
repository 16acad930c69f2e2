"""From a config to its architecture's decoder and tensors; plain data, so that checkpoint tools need no torch."""

import math
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

from ..core.tensors import TensorSpec
from . import architectures as folder
from .shape import ModelShape
from .spec import EMBEDDING, POSITIONS, Architecture, DecoderSpec, ExpertsSpec


@cache
def architectures() -> Mapping[str, Architecture]:
    """Every architecture by name: the modules in architectures/, each with its `ARCHITECTURE`."""
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    found: list[Architecture] = [import_module(f"{folder.__name__}.{name}").ARCHITECTURE for name in names]
    return MappingProxyType({architecture.name: architecture for architecture in found})


def decoder_spec(config: ModelShape) -> DecoderSpec:
    """The decoder that `config` describes."""
    return architectures()[config.architecture].decoder(config)


def tensor_table(config: ModelShape) -> tuple[TensorSpec, ...]:
    """The tensors of `config.architecture`, in forward order."""
    return decoder_spec(config).table


def count_parameters(config: ModelShape) -> int:
    """Parameters of the model; a tied head counts once."""
    return sum(math.prod(spec.shape) for spec in tensor_table(config) if not spec.alias)


def count_multiplied(config: ModelShape) -> float:
    """Parameters that a token is multiplied by: no embedding tables, the head though tied, its own experts only."""
    decoder = decoder_spec(config)
    total = 0.0
    for tensor in decoder.table:
        if (tensor.param or tensor.name) in (EMBEDDING, POSITIONS):
            continue
        block = decoder.layers[tensor.layer].feed_forward if isinstance(tensor.layer, int) else None
        size: float = math.prod(tensor.shape)
        if isinstance(block, ExpertsSpec) and ".experts." in tensor.name:
            size *= block.top_k / block.num_experts
        total += size
    return total
