"""The linear layers of a frozen base that training keeps in codes (QLoRA, arXiv 2305.14314): which, and in what groups.

The codes are those that serving makes of the same weights. The embedding, the head and all that is no matrix of a
linear layer stay as they are.
"""

import math
from collections.abc import Iterable

from ...core.errors import ConfigError
from ...core.local_params import LocalParam
from ...core.quantization import FEWEST_COLUMNS, Grouping, group_columns
from ...core.tensors import TensorSpec
from ..row_slices import most_slices
from ..spec import DecoderSpec
from .targets import is_adaptable


def check_coded(spec: DecoderSpec, name: str) -> None:
    """Raises ConfigError if a model cannot be trained on a base in codes; `name` is that of their dtype."""
    if any(tensor.expert is not None for tensor in spec.table):
        raise ConfigError(
            f'[lora] base = "{name}": training keeps no experts in codes. Use base = "auto", and ZeRO stage 3, which '
            "spreads the base over ranks."
        )


def coded_groupings(spec: DecoderSpec, tp: int) -> dict[str, Grouping]:
    """Returns the groupings of the parameters in codes, by name; none if the base is not in codes.

    Groups divide the columns of every rank, so each finds the same codes as one rank alone.
    """
    found = {}
    for tensor in spec.table if spec.base_bits else ():
        if is_adaptable(tensor) and not tensor.trainable:
            grouping = Grouping(spec.base_bits, group_columns(_segment(spec, tensor, tp), spec.base_bits))
            if grouping.columns >= FEWEST_COLUMNS:
                found[tensor.param or tensor.name] = grouping
    return found


def _segment(spec: DecoderSpec, tensor: TensorSpec, tp: int) -> int:
    """Returns the columns, in features, that groups divide: those of a slice if the columns are split over ranks."""
    columns = 1 - int(spec.transposed)
    split = tensor.split
    slices = math.lcm(most_slices(spec), tp) if split is not None and split.dim == columns else 1
    return tensor.shape[columns] // slices


def resident_table(spec: DecoderSpec, tp: int) -> tuple[TensorSpec, ...]:
    """Returns the tensors that ranks hold as numbers: all but those in codes."""
    coded = coded_groupings(spec, tp)
    return tuple(tensor for tensor in spec.table if (tensor.param or tensor.name) not in coded)


def coded_bytes(spec: DecoderSpec, params: Iterable[LocalParam], tp: int) -> int:
    """Returns the bytes of the codes and scales of those of a rank's parameters that are in codes."""
    coded = coded_groupings(spec, tp)
    held = [(param, coded[param.name]) for param in params if param.name in coded]
    return sum(param.size // grouping.columns * grouping.group_bytes for param, grouping in held)
