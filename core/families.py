"""Families of tensors: the ranks that share what an optimizer keeps of a tensor, and the slots that they keep."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .dtypes import DType, by_code


@dataclass(frozen=True, slots=True)
class TensorFamily:
    """What the tensors of a bucket have in common.

    Attributes:
        name: the name of the ranks that share a bucket: "dense" = the data ranks, "experts" = those that hold the same
            experts, if these are other ranks.
        states: the slots that they keep of each element beside the weight, with their safetensors codes.
    """

    name: str
    states: Mapping[str, str] = field(hash=False)

    def kept_apart(self, holds_masters: bool) -> dict[str, DType]:
        """Returns the formats of the slots that are kept apart from the parameters.

        Args:
            holds_masters: whether the parameters that a rank updates are themselves the fp32 masters.
        """
        return {slot: by_code(code) for slot, code in self.states.items() if slot != "master" or not holds_masters}
