"""The GPUs of a machine against the ranks that train on it, and what ranks on GPUs set and say (no torch)."""

import logging
from collections.abc import Iterator, Mapping
from typing import Final

from ...core.cuda import count_gpus, has_driver
from ...core.errors import ConfigError, ParallelError
from ...core.gpu_cards import Capability, gpu_features
from ..config.sections import PrecisionSection
from ..config.train_config import TrainConfig

_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's older name

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


def gpu_environment(config: TrainConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ranks on GPUs need before torch is loaded, but for those that are set already.

    Memory comes in segments that grow: pieces of other sizes, as of rows of other lengths, leave no holes. If tensor
    parallelism overlaps, all kernels go through one queue of the GPU, so that a message that was started before a
    product also begins before it; a product of all multiprocessors would hold it back. ZeRO-3 needs several queues: in
    one, a gather that waits would hold back the products behind it.
    """
    if not has_driver():
        return {}
    found = {} if _ALLOCATOR[1] in given else {_ALLOCATOR[0]: "expandable_segments:True"}
    parallel = config.parallel
    if parallel.tp > 1 and parallel.sequence_parallel and config.zero.stage < 3:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {name: value for name, value in found.items() if name not in given}


def require_dtype(params: str, capability: Capability) -> None:
    """Raises ConfigError if the GPUs of a rank have no such products."""
    if params == "bf16" and not gpu_features(capability).bf16:
        major, minor = capability
        raise ConfigError(
            f"[precision] params is bf16, and GPUs of compute capability {major}.{minor} have no bf16 (8.0 and newer "
            'have): set precision.params = "fp16" or "fp32".'
        )


def precision_notes(precision: PrecisionSection, capability: Capability) -> Iterator[tuple[int, str]]:
    """Yields the level and the text of what a run on GPUs says of its precision.

    Args:
        precision: the section of the run.
        capability: the compute capability of the GPUs.
    """
    has, (major, minor) = gpu_features(capability), capability
    if not precision.tf32:
        yield logging.INFO, "fp32 products are computed in fp32; [precision] tf32 = true allows TF32"
    elif has.tf32:
        yield logging.INFO, "fp32 products are computed in TF32, by [precision] tf32 = true"
    else:
        yield logging.WARNING, f"[precision] tf32 = true changes nothing: GPUs of capability {major}.{minor} lack TF32"
    if precision.params == "fp32":
        yield (
            logging.WARNING,
            "[precision] params is fp32, for which GPUs take several times the time and twice the memory of "
            f'activations: set precision.params = "{"bf16" if has.bf16 else "fp16"}"',
        )
