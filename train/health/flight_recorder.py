"""c10d's flight recorder: a rank keeps its last collectives in memory and writes them to a file if it loses others."""

import json
import os
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # torch's stub lacks it

from ...parallel.local_link import LinkLost
from .stall_detector import FLIGHT_RECORD

_ENTRIES = "512"  # about 0.5 KiB each in the file


def start_flight_recorder(logs: Path) -> None:
    """Makes c10d record collectives; must be called before the process group is created.

    NCCL can end a rank without Python; it then writes its own files to `logs`.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((logs / "flight-recorder-nccl-rank-").absolute()))


def dump_flight_record(logs: Path, rank: int, error: Exception) -> None:
    """Writes this rank's recorded collectives, and the error that ended it, to its file in `logs` as JSON.

    The error matters because c10d does not record messages over tk's own links.
    """
    logs.mkdir(parents=True, exist_ok=True)
    try:
        record = json.loads(_dump_fr_trace_json())
    except ValueError:  # the error must be in the file even if c10d's record is broken
        record = {}
    record["ended_by"] = str(error)
    (logs / FLIGHT_RECORD.format(rank=rank)).write_text(json.dumps(record), encoding="utf-8")


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error only shows that other ranks have died or are stuck, so that it is not the cause of the failure.

    Such errors come from tk's links, from c10d, and from gloo, whose errors have no class of their own. An error that
    was raised from one of them counts too.
    """
    if isinstance(error, LinkLost | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return True
    return error.__cause__ is not None and is_peer_loss(error.__cause__)
