"""The GPUs that this process may use, and their free memory, as NVIDIA's driver reports them, without loading torch."""

import ctypes
import runpy
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .errors import ConfigError
from .gpu_cards import Capability

_SUCCESS: Final = 0
_MAJOR, _MINOR = 75, 76  # the driver's numbers of the attributes of a compute capability
_LONGEST_NAME: Final = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as the driver describes it.

    Attributes:
        name: the name of the card.
        capability: its compute capability.
    """

    name: str
    capability: Capability


@cache
def count_gpus() -> int:
    """Returns the number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process; 0 without a driver, or with a torch
    that is built for CPUs only."""
    driver = _load_driver()
    count = ctypes.c_int(0)
    if (
        driver is None
        or not _torch_has_cuda()
        or driver.cuInit(0) != _SUCCESS
        or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS
    ):
        return 0
    return count.value


def read_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that `count_gpus` counts."""
    driver = _load_driver()
    return tuple(_read(driver, index) for index in range(count_gpus())) if driver else ()


def _read(driver: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(_LONGEST_NAME)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, _LONGEST_NAME, device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value))


def free_gpu_memory(num_gpus: int) -> tuple[int, ...]:
    """Returns the number of free bytes of each of the first GPUs, of which `count_gpus` has found at least so many.

    Raises:
        ConfigError: the driver does not open a GPU, for example because another process has all of its memory.
    """
    driver = _load_driver()
    assert driver is not None, "no driver, and so no GPU"
    return tuple(_free_bytes(driver, index) for index in range(num_gpus))


def has_driver() -> bool:
    """Returns whether NVIDIA's driver is installed."""
    return _load_driver() is not None


def _torch_has_cuda() -> bool:
    """Reads it from a file of torch's: to load torch takes seconds."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] is not None


def _load_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _free_bytes(driver: ctypes.CDLL, index: int) -> int:
    """Asks in the GPU's primary context, which is released again: the engine's process keeps nothing on a GPU."""

    def call(function: str, *arguments: object) -> None:
        code = driver[function](*arguments)
        if code != _SUCCESS:
            raise ConfigError(
                f"NVIDIA's driver does not open GPU {index} ({function} answers {code}). Free it, or choose others by "
                'CUDA_VISIBLE_DEVICES; CUDA_VISIBLE_DEVICES="" computes on the CPU.'
            )

    device, context = ctypes.c_int(0), ctypes.c_void_p()
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value
