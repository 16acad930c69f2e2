"""The start of a process on its device: a GPU that is its own, the rule for fp32 products, and the process group."""

from typing import Any

import torch
import torch.distributed as dist


def take_gpu(index: int, tf32: bool = False) -> torch.device:
    """Makes a GPU this process's own, and decides how it multiplies fp32 tensors.

    torch leaves that to variables of the environment, which some images set.

    Args:
        index: the number of the GPU among those that this process sees.
        tf32: whether operands may be rounded to the 10 bits of TF32.
    """
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return device


def join_group(device: torch.device, **options: Any) -> None:
    """Joins torch's default process group: NCCL's for a GPU, which all ranks connect at once, else gloo's.

    Args:
        device: the device of this rank, a GPU with its number.
        options: how ranks find each other, as `init_process_group` takes it.
    """
    if device.type != "cuda":
        dist.init_process_group("gloo", **options)
        return
    dist.init_process_group("nccl", device_id=device, **options)
