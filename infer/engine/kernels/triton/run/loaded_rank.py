"""What a rank has loaded, and its kernels compute with."""

from dataclasses import dataclass

from ......parallel.mesh import Group
from ....program.lower import Program
from ...aten.kv_cache import KVCache
from ...aten.prepared_weights import PreparedWeights
from .device_adapters import DeviceAdapters


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank on its device.

    Attributes:
        program: the operations of a step.
        weights: all parameters of these.
        cache: the KV cache.
        tp: the tensor-parallel group.
        is_fixed: whether rows have the same bits in any batch: see `Job.batch_invariant`.
        adapters: the slots of adapters; None without any.
    """

    program: Program
    weights: PreparedWeights
    cache: KVCache
    tp: Group
    is_fixed: bool = False
    adapters: DeviceAdapters | None = None
