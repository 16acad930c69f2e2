"""Everything that is asked of a GPU's streams: copies that do not wait, and waits for copies. A CPU needs neither."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

_PORTABLE: Final = 1  # cudaHostRegisterPortable


def pin_in_place(values: torch.Tensor) -> tuple[int, Callable[[], object]]:
    """Registers memory of the host with CUDA, so that copies from and to GPUs need not wait for it.

    Returns:
        0, or the code of CUDA's error, with which the memory stays as it was; and the function that takes it back.
    """
    if not values.numel():
        return 0, _nothing
    cudart: Any = torch.cuda.cudart()
    address = values.data_ptr()
    code = int(cudart.cudaHostRegister(address, values.nbytes, _PORTABLE))
    return code, _nothing if code else partial(cudart.cudaHostUnregister, address)


def _nothing() -> None:
    """Takes back memory that was not registered."""


def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns values of the host in memory from which a copy to `device` need not wait; any thread may call it.

    The memory is torch's: it is used again once the copies that read it have ended.
    """
    if device.type == "cpu":
        return values
    with torch.cuda.device(device):  # a thread begins on device 0, where it would make a context
        return values.pin_memory()


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns values of the host on a device, without waiting for the device."""
    return values if device.type == "cpu" else pinned(values, device).to(device, non_blocking=True)


def copy_between(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
    """Copies values between `device` and pinned memory; returns once both may be read and written again.

    The device converts dtypes: a copy of torch's that waits would convert on the host, in memory that is not pinned.
    """
    target.copy_(source, non_blocking=True)
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


def start_copy_up(source: torch.Tensor, target: torch.Tensor) -> Any:
    """Starts a copy from pinned memory to a device, on its present stream.

    Returns:
        An event; once its `synchronize` returns, `source` may be written again.
    """
    target.copy_(source, non_blocking=True)
    return torch.cuda.current_stream(target.device).record_event()


def mark(device: torch.device) -> Any:
    """Returns an event whose `synchronize` waits for all that `device` has begun; None on a CPU, which has ended it."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()


class SideStream:
    """A stream for copies from a GPU to pinned memory, which go on beside its computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Has the block's operations on this stream, after all that the present stream has begun."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Returns once the host may read what was copied, and the GPU may change it."""
        self._stream.synchronize()
