"""The native libraries of the house, for `tk doctor` and for builds ahead of time."""

from ..core.native import NativeSource
from ..infer.engine.kernels.native.binding.library import SOURCE as KERNELS
from ..infer.engine.kernels.sampler.native_sampler import SOURCE as SAMPLER
from ..train.engine.native_attention import SOURCE as ATTENTION
from ..train.zero.native_adamw import SOURCE as ADAMW


def native_sources() -> tuple[NativeSource, ...]:
    """Returns the sources of all native libraries that inference and training load."""
    return (KERNELS, SAMPLER, ADAMW, ATTENTION)
