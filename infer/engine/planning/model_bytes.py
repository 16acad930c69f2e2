"""The bytes of a model on a rank: of its weights, and of the keys and values of a token."""

from collections.abc import Mapping

from ....core import dtypes
from ....core.local_params import LocalParam
from ....core.quantization import Grouping
from ....model.config import ModelConfig
from ....model.registry import decoder_spec
from ..kv_formats import kv_format
from ..program.lower import lower
from ..program.quantization import groupings


def weight_bytes_per_rank(config: ModelConfig, tp: int, dtype: str, weight_dtype: str = "auto") -> int:
    """Returns the bytes of weights on the rank with most.

    Args:
        config: the model.
        tp: the number of tensor-parallel ranks.
        dtype: the dtype of weights that are not quantized.
        weight_dtype: see EngineOptions.

    Raises:
        ParallelError: tp does not divide the model.
    """
    spec, itemsize = decoder_spec(config), dtypes.by_name(dtype).itemsize
    programs = [lower(spec, tp, rank) for rank in range(tp)]
    quantized = groupings(programs[0], weight_dtype)
    return max(sum(_param_bytes(param, quantized, itemsize) for param in program.params) for program in programs)


def _param_bytes(param: LocalParam, quantized: Mapping[str, Grouping], itemsize: int) -> int:
    grouping = quantized.get(param.name)
    return param.size * itemsize if grouping is None else param.size // grouping.columns * grouping.group_bytes


def kv_bytes_per_rank(config: ModelConfig, tp: int, kv_dtype: str) -> int:
    """Returns the bytes of keys and values of one token over all layers, on one rank, if no head is padded.

    Args:
        config: the model.
        tp: the number of tensor-parallel ranks.
        kv_dtype: the dtype of the cache.
    """
    vectors_bytes = kv_format(kv_dtype).num_bytes(config.head_dim)
    return config.num_hidden_layers * max(1, config.num_key_value_heads // tp) * vectors_bytes
