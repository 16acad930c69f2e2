"""Runners of the backend on a CPU, with kernels of the reference and pretended graphs, and ATen's beside them."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.shared_read import ALONE as NO_PEERS
from tk.core.dtypes import by_name
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.aten.kv_cache import KVCache
from tk.infer.engine.kernels.aten.model_runner import ModelRunner
from tk.infer.engine.kernels.aten.pages import CPU
from tk.infer.engine.kernels.aten.prepared_weights import PreparedWeights
from tk.infer.engine.kernels.loading import load_weights
from tk.infer.engine.kernels.triton.run.assembly import assemble, with_slots
from tk.infer.engine.kernels.triton.run.loaded_rank import LoadedRank
from tk.infer.engine.kernels.triton.run.model_runner import TritonRunner
from tk.infer.engine.program.lower import lower, serving_slices
from tk.infer.engine.program.quantization import groupings
from tk.infer.engine.program.weights import load_params
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.parallel.mesh import ALONE, Group
from tk.tests.infer.engine.kernels.triton.pretended_graphs import PretendedGraphs
from tk.tests.infer.engine.kernels.triton.reference_kernels import ReferenceKernels


def runners(
    folder: Path,
    dtype: str = "fp32",
    kv_dtype: str = "fp32",
    weight_dtype: str = "auto",
    make_kernels: Any = ReferenceKernels,
    tp: Group = ALONE,
    device: torch.device = CPU,
    is_fixed: bool = False,
    **sizes: int,
) -> tuple[TritonRunner, ModelRunner, PretendedGraphs]:
    """Returns a runner with pretended graphs, one of ATen's with the same weights, each with its cache; and the graphs.

    Args:
        is_fixed: whether rows have the same bits in any batch.
        sizes: further fields of the job.
    """
    checkpoint = Checkpoint.open(folder)
    spec = decoder_spec(stored_config(checkpoint))
    program = lower(spec, tp.size, tp.rank, serving_slices(spec, tp.size, dtype))
    weights = PreparedWeights(program, by_name(dtype), weight_dtype, device)
    size: dict[str, Any] = {"num_blocks": 8, "kv_bytes": 0, "block_size": 16, "max_batched_tokens": 64}
    size |= {"num_twins": 7} | sizes
    job = Job(str(folder), "triton", dtype, kv_dtype, weight_dtype=weight_dtype, **size)
    wide = {*groupings(program, weight_dtype), *program.wide}
    load = partial(load_params, program.params, spec.table, checkpoint, by_name(dtype), wide=wide)
    weights.keep_key_factors(load_weights(job, program, load, weights.take, NO_PEERS, 1))

    def cache() -> KVCache:
        shape = (program.num_layers, job.num_blocks, program.num_kv_heads, job.block_size, program.head_dim)
        return KVCache(*shape, kv_dtype, job.num_twins, device)

    graphs = PretendedGraphs()
    loaded = with_slots(LoadedRank(program, weights, cache(), tp, is_fixed), job)
    made = assemble(job, loaded, lambda *parts: graphs.kernels(make_kernels(*parts)), graphs)
    with_adapters = job.adapter_slots > 0
    return made, ModelRunner(program, weights, cache(), tp, job.max_batched_tokens, with_adapters), graphs
