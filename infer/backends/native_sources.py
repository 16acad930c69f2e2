"""The native libraries of inference, for `tk doctor` and for builds ahead of time."""

from ...core.native import NativeSource


def native_sources() -> tuple[NativeSource, ...]:
    """Returns the sources of all native libraries that inference loads."""
    return ()
