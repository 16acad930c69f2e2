"""Everything that is asked of a GPU's streams: copies that do not wait, and waits for copies. A CPU needs neither."""

import torch


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
