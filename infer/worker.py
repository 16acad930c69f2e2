"""One tensor-parallel rank of the engine: `python -m tk.infer.worker FD`, a socket to the engine being that descriptor.

It loads its part of the model, says so, and then carries out step plans until the socket ends. It holds no state about
requests but the cache's pages.
"""

import ctypes
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ..checkpoint import Checkpoint
from ..core.errors import TkError
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.loading import load_weights
from ..parallel.mesh import ALONE, Group
from .ipc import Frame, error_frame, receive, send
from .kv_cache import TORCH_DTYPES, KVCache
from .model_runner import ModelRunner, num_slices
from .row_tiles import SMALLEST
from .step_plan import StepPlan

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """The process's entry. Returns when the engine is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also where we wait for other ranks, not for the engine
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the engine decides when its workers end
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        _serve(connection)
    except TkError as error:
        _report(connection, error)
    except Exception as error:
        traceback.print_exc()
        _report(connection, TkError(f"An inference worker failed: {type(error).__name__}: {error}"))
    return 0


def _report(connection: socket.socket, error: TkError) -> None:
    """Tells the engine, and waits for it to end this process: other ranks should not notice before it does."""
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
    tp = _join(job["rank"], job["tp"], job["store"])
    checkpoint = Checkpoint.open(Path(job["checkpoint"]))
    config = ModelConfig.from_json(checkpoint.config(), str(checkpoint.path / "config.json"))
    dtype = TORCH_DTYPES[job["dtype"]]
    slices = num_slices(config, tp.size, dtype)
    device = torch.device("cpu")
    decoder = Decoder(config, tp, dtype=dtype, device=device, num_slices=slices, row_tile=SMALLEST)
    load_weights(decoder, checkpoint)
    num_kv_heads = max(1, config.num_key_value_heads // tp.size)
    cache = KVCache(
        config.num_hidden_layers, job["num_blocks"], num_kv_heads, job["block_size"], config.head_dim, job["kv_dtype"]
    )
    return ModelRunner(decoder, cache, tp, job["max_batched_tokens"])


def _join(rank: int, size: int, store: str) -> Group:
    if size == 1:
        return ALONE
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return Group(dist.group.WORLD, rank, size)


if __name__ == "__main__":
    sys.exit(main())
