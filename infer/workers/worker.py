"""One tensor-parallel rank of the engine, in a process that `worker_entry.py` starts.

The worker loads its part of the model, reports that it is ready, and carries out step plans until the socket ends. Its
only state about requests is the content of the cache.
"""

import socket
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ...checkpoint import Checkpoint
from ...core.errors import ConfigError, TkError, WorkerDied
from ...core.progress import format_bytes
from ...model.decoder import Decoder
from ...model.loading import load_weights, peers
from ...model.stored_config import stored_config
from ...parallel.layers import LayerContext
from ...parallel.mesh import ALONE, Group, join_world
from ...parallel.torch_dtypes import torch_dtype
from ..backends.aten.kv_cache import KVCache
from ..backends.aten.model_runner import ModelRunner, num_slices
from ..backends.aten.row_tiles import SMALLEST
from ..scheduling.step_plan import StepPlan
from .ipc import Frame, error_frame, receive, send


def work(descriptor: int) -> None:
    """Serves the engine at the other end of a socket; returns when the engine has ended."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            _serve(connection)
        except TkError as error:
            _report(connection, error)
        except Exception as error:
            traceback.print_exc()
            _report(connection, TkError(f"An inference worker failed: {type(error).__name__}: {error}"))


def _report(connection: socket.socket, error: TkError) -> None:
    """Reports an error and waits until the engine ends this process.

    If this process ended by itself, other ranks would fail too, and the engine might see their errors first.
    """
    with suppress(WorkerDied):  # the engine has ended or closed the connection
        send(connection, error_frame(error))
        receive(connection)


def _serve(connection: socket.socket) -> None:
    start = receive(connection)
    if start is None:
        return
    runner = _load(start)
    send(connection, Frame("ready", {"sizes": runner.sizes, "kv_bytes": runner.cache.num_bytes}))
    while (frame := receive(connection)) is not None:
        result = runner.run(StepPlan.from_arrays(frame.arrays))
        if result is not None:
            send(connection, Frame("result", arrays=result.arrays()))


def _load(start: Frame) -> ModelRunner:
    job = start.values
    device = _device(job["rank"], job["tp"])
    tp = _join(job["rank"], job["tp"], job["store"], device)
    checkpoint = Checkpoint.open(Path(job["checkpoint"]))
    config = stored_config(checkpoint)
    dtype = torch_dtype(job["dtype"])
    slices = num_slices(config, tp.size, dtype)
    decoder = Decoder(config, LayerContext(tp, dtype, device), num_slices=slices, row_tile=SMALLEST)
    load_weights(decoder, checkpoint, peers=peers(tp))
    if device.type == "cuda":
        _check_room(job["kv_bytes"], device)
    num_kv_heads = max(1, config.num_key_value_heads // tp.size)
    cache = KVCache(
        config.num_hidden_layers, job["num_blocks"], num_kv_heads, job["block_size"], config.head_dim, job["kv_dtype"]
    )
    return ModelRunner(decoder, cache, tp, job["max_batched_tokens"])


def _device(rank: int, size: int) -> torch.device:
    """Returns this rank's GPU, or the CPU if the machine has fewer GPUs than ranks; makes a GPU torch's default."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < size:
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return device


def _check_room(kv_bytes: int, device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    if kv_bytes > free:
        raise ConfigError(
            f"The KV cache takes {format_bytes(kv_bytes)}, but {device} has only {format_bytes(free)} free beside the "
            "weights: lower --kv-memory, or use more ranks."
        )


def _join(rank: int, size: int, store: str, device: torch.device) -> Group:
    if size == 1:
        return ALONE
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    return join_world()
