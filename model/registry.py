"""The architectures by name, and the decoder and tensors of a config; plain data for checkpoint tools without torch."""

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
    """Returns every architecture by name: the `ARCHITECTURE` of each module in architectures/."""
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    found: list[Architecture] = [import_module(f"{folder.__name__}.{name}").ARCHITECTURE for name in names]
    return MappingProxyType({architecture.name: architecture for architecture in found})


def decoder_spec(config: ModelShape) -> DecoderSpec:
    """Returns the description of the decoder of a config."""
    return architectures()[config.architecture].decoder(config)


def tensor_table(config: ModelShape) -> tuple[TensorSpec, ...]:
    """Returns the tensors of a config's model, in forward order."""
    return decoder_spec(config).table


def count_parameters(decoder: DecoderSpec) -> int:
    """Returns the number of parameters of the model; a tied head counts once."""
    return sum(math.prod(spec.shape) for spec in decoder.table if not spec.alias)


def count_multiplied(decoder: DecoderSpec) -> float:
    """Returns the number of parameters that one token is multiplied by.

    They are those of matrix products, and the few of norms and biases. Embedding tables do not count; a head counts
    even if it is tied; of experts, only those of the token count.
    """
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
