"""From a config to its architecture's tensors; plain data, so that checkpoint tools need no torch."""

from ..core.layout import TensorSpec
from .architectures import llama
from .config import ModelConfig


def tensor_table(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The tensors of `config.architecture`, in forward order."""
    tables = {"llama": llama.tensor_table}
    return tables[config.architecture](config)


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model; a tied head counts once."""
    total = 0
    for spec in tensor_table(config):
        size = 1
        for extent in spec.shape:
            size *= extent
        total += 0 if spec.alias else size
    return total
