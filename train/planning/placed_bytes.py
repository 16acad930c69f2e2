"""The bytes of a rank by place and part (no torch)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TRANSFERS: Final = "pinned for transfers"  # only where ranks compute on GPUs


@dataclass(frozen=True, slots=True)
class PlacedBytes:
    """The bytes of a rank by part, in each of three places.

    Attributes:
        device: the parts in the memory of the device that trains.
        host: the parts in the memory of the host. If ranks train on CPUs that is the same memory.
        disk: the parts in files.
    """

    device: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)

    def __or__(self, other: "PlacedBytes") -> "PlacedBytes":
        """Returns the parts of both; they share none."""
        return PlacedBytes({**self.device, **other.device}, {**self.host, **other.host}, {**self.disk, **other.disk})

    @property
    def on_device(self) -> int:
        """The bytes of the device's memory."""
        return sum(self.device.values())

    @property
    def on_host(self) -> int:
        """The bytes of the host's memory beside a GPU."""
        return sum(self.host.values())

    @property
    def on_disk(self) -> int:
        """The bytes of the disk."""
        return sum(self.disk.values())

    @property
    def on_cpu(self) -> int:
        """The bytes of memory of a rank that trains on a CPU, which transfers nothing."""
        return self.on_device + self.on_host - self.host.get(TRANSFERS, 0)
