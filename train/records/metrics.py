"""metrics.jsonl, the record of a run: one line of JSON per logged step or evaluation. Also the peak rate and memory."""

import json
import resource
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from ...checkpoint.files.small_files import replace_small
from ...core.gpu_cards import card_named
from ...parallel.products import matmul
from ..config.extras import require_tensorboard
from .run_files import METRICS

_MEASURING_SECONDS: Final = 0.2


class MetricsFile:
    """Appends lines to `folder`/metrics.jsonl, each flushed at once.

    Lines beyond `last_step` are cut when a run resumes: their steps will be made again. The others survive any crash.

    Args:
        folder: the run folder.
        last_step: the step from which the run goes on.
        attempt: the attempt of the run folder's lock, which the caller holds.
        tensorboard: whether the same values are written to TensorBoard's event files.
    """

    def __init__(self, folder: Path, last_step: int, attempt: str, tensorboard: bool = False) -> None:
        path = folder / METRICS
        kept = _lines_up_to(path, last_step) if path.exists() else []
        replace_small(path, "".join(kept).encode(), attempt)
        self._file = path.open("a", encoding="utf-8")
        self._events = _event_writer(folder / "tensorboard", last_step) if tensorboard else None

    def write(self, step: int, **values: float | None) -> None:
        """Appends one line; None is a number that was not finite."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def _event_writer(folder: Path, last_step: int) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter  # the extra's, so imported only when asked for

    return SummaryWriter(str(folder), purge_step=last_step + 1)


def _lines_up_to(path: Path, last_step: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(f"{line}\n")  # a crash may have left a line whole and cut off its end of line
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short by a crash
    return kept


@lru_cache(maxsize=8)
def peak_flops(device: torch.device, dtype: torch.dtype, minute: int) -> float:
    """Returns the peak rate of one rank in FLOP/s: of the data sheet for 16 bits of a known GPU, else as measured.

    The measurement is of the product that the model uses.

    Args:
        minute: the number of the minute, in which one measurement is enough; a CPU with neighbours changes its rate.
    """
    if device.type == "cuda":
        card = card_named(torch.cuda.get_device_name(device))
        if card is not None and dtype != torch.float32:
            return card.flops
    size = 1024
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, begin = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() < begin + _MEASURING_SECONDS:
        start = time.perf_counter()
        matmul(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def memory_bytes(device: torch.device) -> int:
    """Returns the most memory in bytes that this rank has used: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
