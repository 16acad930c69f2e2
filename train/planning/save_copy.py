"""The size of the copy from which a save in the background is written (no torch)."""

from ...checkpoint.save.save_job import Buffers, SaveJob
from ...core.dtypes import FP32, by_name
from ...core.layout import Layout
from ...core.tensors import Table
from ..config.train_config import TrainConfig


def save_copy_bytes(config: TrainConfig, table: Table, layout: Layout, pp: int) -> int:
    """Returns the bytes of the copy, on the rank of pipeline rank `pp` that writes most; 0 if no save needs a copy.

    The copy is allocated at the first save and stays. The first rank writes most: it also saves the tensors that are
    equal on all tp ranks, and a remainder if tensors cannot be distributed evenly.
    """
    every = config.checkpoint.every
    if not config.checkpoint.async_save or not 0 < every < config.train.steps:
        return 0
    states = ["exp_avg", "exp_avg_sq"] + (["master"] if config.precision.params != "fp32" else [])
    slots = {"weight": by_name(config.precision.params).code} | dict.fromkeys(sorted(states), FP32.code)
    rank = pp * layout.dp * layout.tp
    return Buffers(SaveJob(config.run_folder, "", rank, table, layout, slots)).nbytes
