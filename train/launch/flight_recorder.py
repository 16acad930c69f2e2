"""c10d's flight recorder: the last collectives of a rank, kept in memory and written to a file when it loses others."""

import json
import os
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # torch's stub lacks it

from ...parallel.local_link import LinkLost
from .stall_detector import FLIGHT_RECORD

_ENTRIES = "512"  # some 0.5 KiB each in the file


def start_flight_recorder(logs: Path) -> None:
    """Has c10d record; call before the process group is made. NCCL, which ends a rank by itself, writes into `logs`."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((logs / "flight-recorder-nccl-rank-").absolute()))


def dump_flight_record(logs: Path, rank: int, error: Exception) -> None:
    """Writes what this rank's recorder holds to its file in `logs`, as JSON, and what ended the rank: c10d sees nothing
    of links of our own."""
    logs.mkdir(parents=True, exist_ok=True)
    try:
        record = json.loads(_dump_fr_trace_json())
    except ValueError:  # what ended the rank must be told whatever c10d wrote
        record = {}
    record["ended_by"] = str(error)
    (logs / FLIGHT_RECORD.format(rank=rank)).write_text(json.dumps(record), encoding="utf-8")


def is_echo(error: BaseException) -> bool:
    """Whether an error only shows that other ranks are gone or stuck: our links' and c10d's own, gloo's, which have no
    class, and whatever was raised from one of them."""
    if isinstance(error, LinkLost | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return True
    return error.__cause__ is not None and is_echo(error.__cause__)
