"""The GPUs of a machine against the ranks that train on it: one GPU for each rank, or none at all (no torch)."""

from ...core.cuda import count_gpus
from ...core.errors import ParallelError

_REMEDY = "Choose a layout of fewer ranks, more machines, or CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."


def require_gpus(num_ranks: int) -> None:
    """Raises ParallelError if this machine has GPUs, but too few for the ranks that start on it."""
    num_gpus = count_gpus()
    if 0 < num_gpus < num_ranks:
        raise ParallelError(
            f"{num_ranks} ranks start on this machine, where CUDA_VISIBLE_DEVICES and the driver leave them {num_gpus} "
            f"GPUs, and each rank needs one of its own. {_REMEDY}"
        )


def require_local_gpu(local_rank: int, local_ranks: int, num_gpus: int) -> None:
    """Raises ParallelError if the ranks of this machine have too few GPUs.

    Args:
        local_rank, local_ranks: the number of this rank among those of the machine, and how many they are.
        num_gpus: how many GPUs torch finds in this process, at least one.
    """
    if max(local_rank + 1, local_ranks) > num_gpus:
        raise ParallelError(
            f"This rank's LOCAL_RANK is {local_rank} and its LOCAL_WORLD_SIZE {local_ranks}, but CUDA_VISIBLE_DEVICES "
            f"and the driver leave this process {num_gpus} GPUs, and each rank needs one of its own; all local ranks "
            f"see the same GPUs. {_REMEDY}"
        )
