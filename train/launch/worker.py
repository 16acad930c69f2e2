"""One training rank: it joins its job and trains. The launcher starts it through rank.py, or torchrun does."""

import json
import logging
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ...core.config import parse
from ...core.console_log import show_log
from ...core.errors import ConfigError, TkError
from ...core.process import keep_freed_memory, return_large_blocks
from ...parallel.gpu_start import join_group, take_gpu
from ..config.train_config import TrainConfig
from ..health.flight_recorder import dump_flight_record, is_peer_loss, start_flight_recorder
from ..health.heartbeat import HEARTBEATS_VARIABLE, Heartbeat
from ..health.stop import StopRequest
from ..records.run_events import events_on_stdout
from ..run.trainer import Trainer
from .gpus import precision_notes, require_dtype, require_local_gpu
from .launcher import EVENTS, FORK, RENDEZVOUS_VARIABLE
from .rank_report import write_error
from .rendezvous import agents_keep_a_store, rendezvous_store
from .torchrun import give_up, keep_earlier_report

_log = logging.getLogger(__name__)

ECHO_SECONDS = 3.0  # under torchrun, signals within this time count as one
SHARED_SECONDS = 1.0  # between two writes of a heartbeat to a run folder that many hosts may share


def run_rank(config: TrainConfig, resume: str, fork: bool = False) -> int:
    """Joins the job that the environment variables RANK and WORLD_SIZE describe, trains, and returns an exit code.

    Raises:
        TkError: the error that ended training.
    """
    launched = RENDEZVOUS_VARIABLE in os.environ
    stop = StopRequest(0.0 if launched else ECHO_SECONDS)
    stop.install()
    rank, world = (_number(variable) for variable in ("RANK", "WORLD_SIZE"))
    logs = config.run_folder / "logs"
    heartbeats = Path(os.environ.get(HEARTBEATS_VARIABLE) or logs / "heartbeats")
    heartbeat = Heartbeat(heartbeats, rank, 0.0 if launched else SHARED_SECONDS)
    if rank == 0 and not launched:
        keep_earlier_report(logs)
    start_flight_recorder(logs)
    try:
        _join(config, rank, world, stop, resume, fork, heartbeat)
    except Exception as error:
        if not is_peer_loss(error):
            raise
        dump_flight_record(logs, rank, error)
        if launched:
            raise
        raise give_up(heartbeat, heartbeats, world, logs, config.parallel.timeout_seconds, error) from error
    return 0


def _join(
    config: TrainConfig, rank: int, world: int, stop: StopRequest, resume: str, fork: bool, heartbeat: Heartbeat
) -> None:
    rendezvous = os.environ.get(RENDEZVOUS_VARIABLE, "env://")
    if rendezvous == "env://" and not os.environ.get("MASTER_ADDR"):
        raise ConfigError(
            "The environment variables RANK and WORLD_SIZE are set, but MASTER_ADDR is not. Start ranks with torchrun, "
            "or unset both variables to let tk start the ranks."
        )
    device, timeout = _device(config), timedelta(seconds=config.parallel.timeout_seconds)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        require_dtype(config.precision.params, capability)
        for level, note in precision_notes(config.precision, capability) if rank == 0 else ():
            _log.log(level, "%s", note)
    if rendezvous == "env://" and agents_keep_a_store():
        store = rendezvous_store(rank, world, timeout)
        join_group(device, store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        join_group(device, init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)
    try:
        offloads = config.offload.optimizer != "none"
        if offloads:  # it has no memory to spare
            return_large_blocks()
        trainer = Trainer(config, device=device, resume=resume, fork=fork, stop=stop, heartbeat=heartbeat)
        if device.type == "cpu" and not offloads:
            keep_freed_memory()  # of its steps, not of its construction, which needs more at once
        trainer.fit()
    finally:
        dist.destroy_process_group()


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise ConfigError(
            f"The environment variable {variable} is {text!r}, but must be a number. Start ranks with torchrun."
        )
    return int(text)


def _device(config: TrainConfig) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
    local_rank, local_ranks = (
        _number(name) if name in os.environ else 0 for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    require_local_gpu(local_rank, local_ranks, torch.cuda.device_count())
    return take_gpu(local_rank, config.precision.tf32)


def main() -> int:
    """Runs a rank of the launcher; the configuration is JSON in the first argument, see rank.py for the others."""
    _, text, resume, form, *flags = sys.argv
    show_log(form, {"rank": int(os.environ["RANK"])})
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        config = parse(json.loads(text), TrainConfig, "the launcher's configuration")
        with events_on_stdout() if EVENTS in flags else nullcontext():
            return run_rank(config, resume, FORK in flags)
    except Exception as error:  # no error may leave the process without a report for the launcher
        write_error(error, int(os.environ["RANK"]), is_peer_loss(error))
        return error.exit_code if isinstance(error, TkError) else 1


if __name__ == "__main__":
    sys.exit(main())
