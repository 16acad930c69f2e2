"""The driver's answers, from a library in its place: the machine of most tests has no GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tk.core import cuda
from tk.core.errors import ConfigError

# Two GPUs with 1 and 2 GiB free; GPU `failing` cannot be opened.
DRIVER = """
#include <stddef.h>
static int current = -1;
int contexts = 0, failing = -1;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 10; return index < 2 ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int device) {
  name[0] = 'G'; name[1] = '0' + device - 10; name[2] = 0; return size < 3;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? device - 2 : attribute == 76 ? device - 10 : -1; return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  if (device - 10 == failing) return 2;
  contexts++; *context = (void *)(size_t)device; return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { contexts--; return 0; }
int cuCtxPushCurrent_v2(void *context) { current = (int)(size_t)context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)(size_t)current; current = -1; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  if (current < 0) return 201;
  *free = (size_t)(current - 9) << 30; *total = 1ull << 40; return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "libcuda.so", "driver.c"], cwd=folder, check=True)
    return ctypes.CDLL(str(Path(folder / "libcuda.so")))


@pytest.fixture
def driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setattr(cuda, "_load_driver", lambda: library)
    monkeypatch.setattr(cuda, "_torch_has_cuda", lambda: True)
    cuda.count_gpus.cache_clear()
    yield library
    cuda.count_gpus.cache_clear()


def test_the_driver_counts_gpus_and_their_free_memory(driver: ctypes.CDLL) -> None:
    assert cuda.count_gpus() == 2
    assert cuda.free_gpu_memory(1) == (1 << 30,)
    assert cuda.free_gpu_memory(2) == (1 << 30, 2 << 30)
    assert ctypes.c_int.in_dll(driver, "contexts").value == 0, "this process keeps nothing on a GPU"


def test_the_driver_names_gpus_and_their_compute_capability(driver: ctypes.CDLL) -> None:
    assert cuda.read_gpus() == (cuda.Gpu("G0", (8, 0)), cuda.Gpu("G1", (9, 1)))


def test_a_gpu_that_cannot_be_opened_is_named(driver: ctypes.CDLL) -> None:
    failing = ctypes.c_int.in_dll(driver, "failing")
    failing.value = 1
    try:
        with pytest.raises(ConfigError, match=r"GPU 1 \(cuDevicePrimaryCtxRetain answers 2\)"):
            cuda.free_gpu_memory(2)
        assert cuda.free_gpu_memory(1) == (1 << 30,)
        assert ctypes.c_int.in_dll(driver, "contexts").value == 0
    finally:
        failing.value = -1


def test_without_a_driver_there_is_no_gpu(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_load_driver", lambda: None)
    assert cuda.count_gpus() == 0
    assert cuda.read_gpus() == ()
    assert not cuda.has_driver()


def test_a_torch_for_cpus_uses_no_gpu(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the file of the installed torch says what it is built for
    monkeypatch.setattr(cuda, "_load_driver", lambda: driver)
    assert cuda.count_gpus() == (2 if torch.version.cuda else 0)
    assert cuda.has_driver()
