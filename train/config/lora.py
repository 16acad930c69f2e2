"""`[lora]`: the adapter that a run trains on a frozen base (no torch)."""

from typing import Literal

from ...core.config import PathKey
from ...model.lora.options import LoraOptions


class LoraSection(LoraOptions):
    """The options of the run's adapter, and its beginning.

    Attributes:
        init: a checkpoint of an adapter of the same base, whose weights the run begins with; None for a new adapter.
        base: the numbers in which the frozen weights of linear layers are kept: "auto" those of precision.params,
            "int8" and "int4" the codes that serving makes of them.
    """

    init: PathKey | None = None
    base: Literal["auto", "int8", "int4"] = "auto"

    @property
    def base_bits(self) -> int:
        """The bits of the base's codes; 0 for no codes."""
        return {"auto": 0, "int8": 8, "int4": 4}[self.base]

    @property
    def options(self) -> LoraOptions:
        """The options of the adapter alone."""
        return LoraOptions(**{key: getattr(self, key) for key in LoraOptions.model_fields})
