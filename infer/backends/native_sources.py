"""The native libraries of inference, for `tk doctor` and for builds ahead of time."""

from ...core.native import NativeSource
from ..sampling.native_sampler import SOURCE as SAMPLER
from .native.binding.library import SOURCE as KERNELS


def native_sources() -> tuple[NativeSource, ...]:
    """Returns the sources of all native libraries that inference loads."""
    return (KERNELS, SAMPLER)
