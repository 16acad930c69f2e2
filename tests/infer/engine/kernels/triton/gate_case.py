"""What the gate compiles for a case: launches, and which kernels of them for which GPUs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CAPABILITIES: Final = (80, 90, 100)  # of GPUs, times ten


@dataclass(frozen=True, slots=True)
class GateCase:
    """Launches whose kernels the gate compiles.

    Attributes:
        launch: calls launch functions with tensors on torch's "meta" device.
        kernels: the names of those that are compiled; empty: all that are launched.
        capabilities: the GPUs for which they are compiled.
    """

    launch: Callable[[], object]
    kernels: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = CAPABILITIES
