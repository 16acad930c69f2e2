"""The facts that `tk doctor` reports: this machine's parts, those that a run uses, and those that are missing.

Functions import torch themselves, so that a broken torch is reported and does not break the report.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..core.cores import usable_cores
from ..core.cpu import read_cpu
from ..core.cuda import has_driver
from ..core.extras import install_line, release_of
from ..core.numa import numa_nodes
from ..core.progress import format_bytes
from ..infer.engine.kernels.triton.reasons import why_not_on
from ..train.config.extras import missing_for_compile

# The bounds of pyproject.toml: the oldest release, and the first that the tests have not passed with.
OLDEST_TORCH: Final = (2, 11)
UNTESTED_TORCH: Final = (2, 14)
_SMALL_SHM: Final = 1 << 30
_FEW_FILES: Final = 4096
_FAST_BF16: Final = frozenset({"avx512_bf16", "amx_bf16"})
_EXTRAS: Final = (
    ("opentelemetry-sdk", "tk serve --otlp-endpoint", "otel"),
    ("tensorboard", "[metrics] tensorboard = true", "tensorboard"),
    ("pyarrow", "data in .parquet files", "parquet"),
    ("llguidance", "constrained output", "structured"),
    ("resvg-py", "tk plot -o FILE.png", "plot"),
)

State = Literal["ok", "note", "broken"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report.

    Attributes:
        section: the heading that the line belongs under.
        name: the part of the machine.
        value: its size, version or state.
        state: "ok"; "note" if something may be slow or unavailable; "broken" if tk cannot run.
        hint: the remedy, if the state is not "ok".
    """

    section: str
    name: str
    value: str
    state: State = "ok"
    hint: str = ""


def examine(folder: Path = Path()) -> list[Fact]:
    """Returns all facts about this machine; `folder` is the place where runs would be written."""
    return [*_hardware(), *_storage(folder), *_network(), *_limits(), *_software(), *_accelerators(), *_use()]


def _hardware() -> Iterator[Fact]:
    cpu = read_cpu()
    usable, installed = usable_cores(), os.cpu_count() or 1
    cores = str(usable) if usable == installed else f"{usable} of {installed} are usable by this process"
    yield Fact("machine", "CPU", cpu.model)
    yield Fact("machine", "cores", cores)
    if len(nodes := numa_nodes()) > 1:
        parts = " + ".join(str(len(node)) for node in nodes)
        hint = f"tk serve --tp {len(nodes)} --numa keeps each rank on one of them"
        yield Fact("machine", "NUMA", f"{len(nodes)} nodes, cores: {parts}", "note", hint)
    yield Fact("machine", "instructions", ", ".join(cpu.instruction_sets) or "baseline only")
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith(("MemTotal", "MemAvailable"))
    }
    yield Fact(
        "machine", "memory", f"{format_bytes(sizes['MemTotal'])}, {format_bytes(sizes['MemAvailable'])} available"
    )


def _storage(folder: Path) -> Iterator[Fact]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < _SMALL_SHM
        hint = "NCCL and data loaders need 1 GiB or more: docker run --shm-size 8g, or an emptyDir with medium: Memory"
        yield Fact("machine", "/dev/shm", format_bytes(size), "note" if small else "ok", hint if small else "")
    else:
        yield Fact("machine", "/dev/shm", "missing", "note", "NCCL needs it: mount a tmpfs there")
    yield Fact("machine", "disk", f"{format_bytes(shutil.disk_usage(folder).free)} free in {folder.absolute()}")


def _network() -> Iterator[Fact]:
    names = []
    for path in sorted(Path("/sys/class/net").glob("*")):
        try:
            state = (path / "operstate").read_text(encoding="ascii").strip()
        except OSError:
            state = "unknown"
        names.append(path.name if state in ("up", "unknown") else f"{path.name} ({state})")
    yield Fact("machine", "network", ", ".join(names) or "no interfaces")
    if fabrics := sorted(path.name for path in Path("/sys/class/infiniband").glob("*")):
        yield Fact("machine", "InfiniBand", ", ".join(fabrics))


def _limits() -> Iterator[Fact]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _FEW_FILES
    hint = f"every connection between ranks is an open file: ulimit -n {_FEW_FILES * 16}"
    yield Fact("limits", "open files", _limit(files), "note" if few else "ok", hint if few else "")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Fact("limits", "locked memory", "unlimited" if locked < 0 else format_bytes(locked))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    yield Fact("limits", "processes", _limit(processes))


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def _software() -> Iterator[Fact]:
    yield Fact("software", "Python", platform.python_version())
    yield _torch()
    yield _compiler()
    for name, purpose, extra in _EXTRAS:
        try:
            yield Fact("software", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Fact("software", name, "not installed", "note", f"needed only for {purpose}: {install_line(extra)}")


def _compiler() -> Fact:
    missing = missing_for_compile()
    hint = "needed only for [train] compile = true: apt install g++ python3-dev, or set CXX=PATH"
    return Fact("software", "torch.compile", missing or "ready", "note" if missing else "ok", hint if missing else "")


def _torch() -> Fact:
    oldest, untested = (".".join(map(str, each)) for each in (OLDEST_TORCH, UNTESTED_TORCH))
    install = f"pip install 'torch>={oldest},<{untested}'"
    hint = f"tk needs {oldest} or newer: {install}"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch cannot be loaded
        return Fact("software", "torch", f"cannot be imported: {error}", "broken", hint)
    version = str(torch.__version__)
    release = release_of(version)
    if release < OLDEST_TORCH:
        return Fact("software", "torch", version, "broken", hint)
    built = f"{version}, CUDA {torch.version.cuda}" if torch.version.cuda else f"{version}, CPU only"
    if release >= UNTESTED_TORCH:
        return Fact("software", "torch", built, "note", f"tk is not tested with {untested} and newer: {install}")
    return Fact("software", "torch", built)


def _accelerators() -> Iterator[Fact]:
    driver = Path("/proc/driver/nvidia/version")
    installed = driver.exists() or has_driver()
    if _torch().state == "broken":
        return
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield Fact("machine", f"GPU {index}", f"{found.name}, {format_bytes(found.total_memory)}")
        if driver.exists():
            version = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text(encoding="ascii", errors="replace"))
            yield Fact("machine", "driver", version[0] if version else "unknown")
        yield Fact("software", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    elif installed and os.environ.get("CUDA_VISIBLE_DEVICES", "-") == "":
        yield Fact("machine", "GPUs", "none: CUDA_VISIBLE_DEVICES is empty, so tk computes on the CPU")
    elif installed:
        yield Fact("machine", "GPUs", *_unused_gpus(torch.version.cuda))
    else:
        yield Fact("machine", "GPUs", "none")
    yield _gloo()


def _unused_gpus(built_for: str | None) -> tuple[str, State, str]:
    """Returns value, state and hint where a driver is installed and torch, built for that CUDA, uses no GPU."""
    if built_for is None:
        value = "an NVIDIA driver is installed, but torch is built for CPUs only: tk computes on the CPU"
        return value, "note", "to use the GPUs, install torch's CUDA build: https://pytorch.org/get-started/locally"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    value = f"an NVIDIA driver is installed, but torch, built for CUDA {built_for}, finds no usable GPU"
    cause = "" if chosen is None else f"CUDA_VISIBLE_DEVICES is {chosen!r}: does it name GPUs of nvidia-smi? Or "
    return value, "note", f"{cause}the driver may be too old for CUDA {built_for}: compare with the head of nvidia-smi"


def _gloo() -> Fact:
    """Starts a process group of one rank, for which gloo needs a network interface and a host name that resolves."""
    import torch.distributed as dist

    hint = "CPU ranks need gloo: name a network interface by GLOO_SOCKET_IFNAME=lo, or add the host name to /etc/hosts"
    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return Fact("software", "gloo", f"cannot start: {error}", "broken", hint)
    return Fact("software", "gloo", "starts")


def _serving(num_gpus: int) -> str:
    """Says where `tk serve` computes by default."""
    reason = why_not_on(1)
    if not num_gpus:
        return "cpu"
    if reason:
        return f"cpu, because {reason}; --kernels aten: the GPUs, if each rank has one"
    return "the GPUs with Triton's kernels, if each rank has one; else the CPU"


def _use() -> Iterator[Fact]:
    """Yields the defaults of `tk train` on this machine."""
    if _torch().state == "broken":
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Fact("tk uses", "device", f"cuda, a GPU per rank, {count} ranks on this machine" if count else "cpu")
    yield Fact("tk uses", "backend", "nccl" if count else "gloo")
    yield Fact("tk uses", "serving on", _serving(count))
    fast = bool(count or _FAST_BF16 & read_cpu().features)
    low = "bf16 saves memory and time on this machine" if fast else "bf16 saves memory but no time on this machine"
    yield Fact("tk uses", "dtype", f"[precision] params, fp32 by default; {low}")
    chosen = os.environ.get("OMP_NUM_THREADS")
    cores = usable_cores()
    threads = f"{chosen} per rank, by OMP_NUM_THREADS" if chosen else f"{cores} cores divided by the local ranks"
    yield Fact("tk uses", "threads", threads)
