"""The assembly of a rank's backend from its weights and its cache: buffers, buckets, and the capture of graphs."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ......core.integers import ceil_div
from ....job import Job
from ..step.buckets import bucket_sizes
from ..step.device_tables import DecodeTables
from .decode_graphs import DecodeGraphs
from .decoder import GpuDecoder
from .device_adapters import DeviceAdapters
from .graphs import Recorder
from .kernels import GpuKernels
from .loaded_rank import LoadedRank
from .model_runner import TritonRunner

# Returns kernels for sequences of so many tokens, and buckets of so many rows.
MakeKernels = Callable[[LoadedRank, int, int], GpuKernels]


def longest_sequence(job: Job) -> int:
    """Returns the largest number of tokens of a sequence."""
    room = job.num_blocks * job.block_size
    return min(job.max_model_len or room, room)


def with_slots(loaded: LoadedRank, job: Job) -> LoadedRank:
    """Returns a rank with the slots of adapters that its job has."""
    if not job.adapter_slots:
        return loaded
    sizes = job.adapter_slots, job.max_adapter_rank, job.adapts_experts
    return replace(loaded, adapters=DeviceAdapters(loaded.program, loaded.weights, *sizes))


@torch.inference_mode()
def assemble(job: Job, loaded: LoadedRank, make_kernels: MakeKernels, recorder: Recorder) -> TritonRunner:
    """Assembles a backend and captures its graphs; every rank calls it.

    Args:
        job: the rank's job.
        loaded: what it computes with.
        make_kernels: returns the kernels.
        recorder: what captures.
    """
    longest, device = longest_sequence(job), loaded.cache.device
    sizes = bucket_sizes(min(job.max_running, job.max_batched_tokens))
    kernels = make_kernels(loaded, longest, sizes[-1])
    decoder = GpuDecoder(loaded, kernels, longest)
    tables = DecodeTables(sizes[-1], ceil_div(longest, job.block_size), device)
    logits_RV = torch.zeros(sizes[-1], loaded.program.vocab_size, device=device)
    graphs = DecodeGraphs(decoder, kernels, sizes, tables, logits_RV, recorder, loaded.adapters)
    return TritonRunner(loaded, decoder, kernels, graphs)
