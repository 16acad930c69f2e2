"""The GPUs that this process may use, as NVIDIA's driver counts them, without torch."""

import ctypes
from functools import cache

_SUCCESS = 0


@cache
def count_gpus() -> int:
    """Returns the number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return 0
    return count.value
