"""The choice of a store: where `[offload]` keeps the optimizer's states."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ....checkpoint.files import folders
from ...config.sections import OffloadSection
from .disk_states import DiskStates
from .memory_states import MemoryStates
from .state_store import StateStore


def open_states(
    dtypes: Mapping[str, torch.dtype],
    sizes: Sequence[int],
    device: torch.device,
    offload: OffloadSection,
    folder: Path,
) -> StateStore:
    """Makes the store of a rank.

    Args:
        dtypes: the dtype of each slot.
        sizes: the elements of the rank's range of each bucket.
        device: the device that trains.
        offload: the options.
        folder: the folder of a file, if `offload` names none; made if it is missing.

    Raises:
        StorageError: the disk cannot hold the states.
    """
    host, has_gpu = torch.device("cpu"), device.type != "cpu"
    if offload.optimizer == "disk":
        place = Path(offload.folder) if offload.folder else folder
        folders.make_dirs(place)
        return DiskStates(dtypes, sizes, place, offload.buffers, pinned=has_gpu)
    if offload.optimizer == "cpu":
        return MemoryStates(dtypes, sizes, host, pinned=has_gpu)
    return MemoryStates(dtypes, sizes, device)
