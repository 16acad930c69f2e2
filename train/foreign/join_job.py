"""The job of torchrun that a script is started in, for scripts that do not join it themselves."""

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ...parallel.gpu_start import join_group


def join_job(device: torch.device, timeout_seconds: float) -> int:
    """Joins the job of torchrun, if this process is in one; returns the number of ranks."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        join_group(device, timeout=timedelta(seconds=timeout_seconds))
        atexit.register(_leave, os.getpid())
    return dist.get_world_size() if dist.is_initialized() else 1


def _leave(process_id: int) -> None:
    """Ends the process group of `join_job` while the interpreter still works.

    Later, a thread of the group that releases a tensor would end the process with SIGABRT. A rank that failed does not
    wait for the group: its collectives may never end. A fork of the process leaves the group to it.
    """
    if os.getpid() == process_id and dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
