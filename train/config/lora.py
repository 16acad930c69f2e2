"""`[lora]`: the adapter that a run trains on a frozen base (no torch)."""

from ...core.config import PathKey
from ...model.lora.options import LoraOptions


class LoraSection(LoraOptions):
    """The options of the run's adapter, and its beginning.

    Attributes:
        init: a checkpoint of an adapter of the same base, whose weights the run begins with; None for a new adapter.
    """

    init: PathKey | None = None

    @property
    def options(self) -> LoraOptions:
        """The options of the adapter alone."""
        return LoraOptions(**{key: getattr(self, key) for key in LoraOptions.model_fields})
