"""One tensor-parallel rank of the engine, in a process of its own that `worker_entry.py` began.

It loads its part of the model, says so, and then carries out step plans until the socket ends. It holds no state about
requests but the cache's pages.
"""

import socket
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ..checkpoint import Checkpoint
from ..core.errors import ConfigError, TkError, WorkerDied
from ..core.progress import format_bytes
from ..model.decoder import Decoder
from ..model.loading import load_weights, peers
from ..model.stored_config import stored_config
from ..parallel.layers import LayerContext
from ..parallel.mesh import ALONE, Group, join_world
from ..parallel.torch_dtypes import torch_dtype
from .ipc import Frame, error_frame, receive, send
from .kv_cache import KVCache
from .model_runner import ModelRunner, num_slices
from .row_tiles import SMALLEST
from .step_plan import StepPlan


def work(descriptor: int) -> None:
    """Serves the engine at the other end of a socket. Returns when the engine is gone."""
    connection = socket.socket(fileno=descriptor)
    try:
        _serve(connection)
    except TkError as error:
        _report(connection, error)
    except Exception as error:
        traceback.print_exc()
        _report(connection, TkError(f"An inference worker failed: {type(error).__name__}: {error}"))


def _report(connection: socket.socket, error: TkError) -> None:
    """Tells the engine, and waits for it to end this process: other ranks should not notice before it does."""
    with suppress(WorkerDied):  # the engine is gone, or does not want to know any more
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
    """A GPU of its own for every rank, or the CPU for all of them. What is made without a device is made there."""
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
            f"The KV cache takes {format_bytes(kv_bytes)}, and {device} has {format_bytes(free)} free beside the "
            "weights: give --kv-memory less, or use more ranks."
        )


def _join(rank: int, size: int, store: str, device: torch.device) -> Group:
    if size == 1:
        return ALONE
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    return join_world()
