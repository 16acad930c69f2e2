"""The start of a rank on torch: its device, its group, its weights and its cache."""

import torch

from .....core import dtypes
from .....core.errors import ConfigError
from .....core.progress import format_bytes
from .....model.peers import peers
from .....parallel.gpu_start import join_group, take_gpu
from .....parallel.mesh import ALONE, Group, join_world
from ...job import Job
from ...program.lower import Program
from ...program.weights import LoadParams
from ..loading import load_weights
from .kv_cache import KVCache
from .model_runner import ModelRunner
from .prepared_weights import PreparedWeights


def prepare(job: Job, program: Program, load: LoadParams) -> ModelRunner:
    """Returns the backend on torch's operators; see `load_rank`."""
    return runner_of(job, program, *load_rank(job, program, load))


def runner_of(job: Job, program: Program, weights: PreparedWeights, cache: KVCache, tp: Group) -> ModelRunner:
    """Returns the backend on torch's operators of a rank that `load_rank` has loaded."""
    return ModelRunner(program, weights, cache, tp, job.max_batched_tokens, job.adapter_slots > 0)


def load_rank(job: Job, program: Program, load: LoadParams) -> tuple[PreparedWeights, KVCache, Group]:
    """Joins the other ranks, loads this rank's weights and allocates its cache; returns these and the ranks' group.

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: torch cannot use the GPU, or the cache does not fit on it beside the weights.
    """
    device = _device(job)
    tp = _join(job, device)
    weights = PreparedWeights(program, dtypes.by_name(job.dtype), job.weight_dtype, device)
    weights.keep_key_factors(load_weights(job, program, load, weights.take, peers(tp), 1))
    if device.type == "cuda":
        _check_room(job.kv_bytes, device)
    cache = KVCache(
        program.num_layers,
        job.num_blocks,
        program.num_kv_heads,
        job.block_size,
        program.head_dim,
        job.kv_dtype,
        job.num_twins,
        device,
    )
    return weights, cache, tp


def _device(job: Job) -> torch.device:
    """Returns this rank's GPU, or the CPU; makes a GPU that of NCCL."""
    if not job.on_gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available() or torch.cuda.device_count() < job.tp:
        raise ConfigError(
            f"NVIDIA's driver has a GPU for each of {job.tp} ranks, but torch {torch.__version__} cannot use them; "
            "`tk doctor` says more. Mend that, or set CUDA_VISIBLE_DEVICES= (empty) to compute on the CPU."
        )
    return take_gpu(job.rank)


def _join(job: Job, device: torch.device) -> Group:
    if job.tp == 1:
        return ALONE
    join_group(device, init_method=f"file://{job.store}", rank=job.rank, world_size=job.tp)
    return join_world()


def _check_room(kv_bytes: int, device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    if kv_bytes > free:
        raise ConfigError(
            f"The KV cache takes {format_bytes(kv_bytes)}, but {device} has only {format_bytes(free)} free beside the "
            "weights: lower --kv-memory, or use more ranks."
        )
