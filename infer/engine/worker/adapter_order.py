"""The engine's order to load an adapter, and how a worker carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....checkpoint import Checkpoint
from ....core.dtypes import by_name
from ....core.errors import CheckpointError
from ....model.config import ModelConfig
from ....model.registry import decoder_spec
from ....model.stored_adapter import StoredAdapter
from ..job import Job
from ..program.adapters import RankAdapter, load_adapter
from ..program.lower import lower, serving_slices


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """An adapter to load into a slot; it travels as a frame's values.

    Attributes:
        slot: the place in the backend.
        path: the absolute path of the adapter's step or folder.
        fingerprint: that of its folder when the engine read it.
        config: the model of the base, as JSON: its folder may have changed since it was loaded.
    """

    slot: int
    path: str
    fingerprint: str
    config: Mapping[str, Any]

    def carry_out(self, job: Job) -> RankAdapter:
        """Reads a rank's part of the adapter.

        Raises:
            CheckpointError: it was changed after the engine read it, or is damaged.
        """
        checkpoint = Checkpoint.open(Path(self.path))
        if checkpoint.folder.fingerprint != self.fingerprint:
            raise CheckpointError(f"{self.path} was replaced or changed while it was loaded. Load it again.")
        config = ModelConfig.model_validate(self.config)
        base = decoder_spec(config)
        program = lower(base, job.tp, job.rank, serving_slices(base, job.tp, job.dtype))
        return load_adapter(program, StoredAdapter.of(checkpoint).decoder(config), checkpoint, by_name(job.dtype))
