"""The choice of a store: where `[offload]` keeps a part of the model states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ....checkpoint.files import folders
from ...config.sections import RESIDENT, OffloadSection, Tier
from .disk_states import DiskStates
from .memory_states import MemoryStates
from .state_store import StateStore


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Where parts of a rank's model states are.

    Attributes:
        device: the device that trains.
        offload: the options.
        folder: the folder of files, if `offload` names none; made if it is missing.
    """

    device: torch.device
    offload: OffloadSection = RESIDENT
    folder: Path = Path()


def open_states(
    tier: Tier, dtypes: Sequence[Mapping[str, torch.dtype]], sizes: Sequence[int], places: StatePlaces
) -> StateStore:
    """Makes a store of a rank.

    Args:
        tier: where its values are.
        dtypes: the dtype of each slot of each bucket.
        sizes: the elements of each bucket's range.
        places: the folder and the options of files.

    Raises:
        StorageError: the disk cannot hold the states.
    """
    has_gpu, offload = places.device.type != "cpu", places.offload
    if tier == "disk":
        folder = Path(offload.folder) if offload.folder else places.folder
        folders.make_dirs(folder)
        return DiskStates(dtypes, sizes, folder, offload.buffers, pinned=has_gpu)
    if tier == "cpu":
        return MemoryStates(dtypes, sizes, torch.device("cpu"), pinned=has_gpu)
    return MemoryStates(dtypes, sizes, places.device)
