"""The size of the copy from which a save in the background is written (no torch)."""

from ...checkpoint.save.save_job import Buffers, SaveJob
from ...core.layout import Layout
from ...core.tensors import Table
from ..config.train_config import TrainConfig


def saves_beside_training(config: TrainConfig) -> bool:
    """Returns whether a step is written while training goes on; the last save is waited for."""
    return config.checkpoint.async_save and 0 < config.checkpoint.every < config.train.steps


def save_copy_bytes(config: TrainConfig, table: Table, layout: Layout, pp: int) -> int:
    """Returns the bytes of the copy, on the rank of pipeline rank `pp` that writes most.

    The copy is allocated at the first save and stays. The first rank writes most: it also saves the tensors that are
    equal on all tp ranks, and a remainder if tensors cannot be distributed evenly. States on disk are not copied.
    """
    on_disk = {slot for spec in table for slot in spec.states} if config.offload.optimizer == "disk" else ()
    rank = pp * layout.stage_size
    return Buffers(SaveJob(config.run_folder, "", rank, table, layout), on_disk).nbytes
