"""AdamW on a CPU: ours in C, torch's fused kernel with the casts it needs, DeepSpeed's CPUAdam, and memory alone.

All have fp32 masters, fp32 gradients with a clip factor, and bf16 parameters, and take turns; ours then with bf16
moments, too. DeepSpeed's stands in the table if it is installed
(`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`, with setuptools, wheel and ninja).
"""

import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import click
import torch

from tk.core.cpu import read_cpu
from tk.core.native import NativeSource, NativeUnit, load_library
from tk.train.zero.adamw_rule import AdamWFactors, AdamWStreams, NativeRule, TorchRule, adamw_rule
from tk.train.zero.element_index import ElementIndex, RandomBits

FACTORS: Final = AdamWFactors(step=7, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_scale=0.5)
PARAMETER_BYTES: Final = 3 * 4 + 2  # of an element: masters are read and written, gradients read, parameters written
# As wide as the widest unit of the kernel, and no wider than the CPU.
_WIDTHS: Final = {"avx512": ("-mavx512f", "-mprefer-vector-width=512"), "avx2": ("-mavx2",)}


class UpdatedPart(ctypes.Structure):
    """A part of the streams; `streams` in moved_streams.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("begin", "end")),
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "bf16")),
        ("has_bf16_states", ctypes.c_int64),
    )


def memory_alone(streams: AdamWStreams, threads: int) -> Callable[[], object]:
    flags = next((_WIDTHS[name] for name in _WIDTHS if name in read_cpu().instruction_sets), ())
    source = Path(__file__).with_name("moved_streams.c")
    loaded = load_library(NativeSource("moved-streams", (NativeUnit("base", source, flags),)))
    if loaded is None:
        raise click.ClickException("no C compiler")
    assert streams.rounded is not None
    count, tensors = streams.master.numel(), (streams.master, streams.exp_avg, streams.exp_avg_sq, streams.grad)
    addresses = [*(tensor.data_ptr() for tensor in tensors), streams.rounded.data_ptr()]
    bounds = [count * number // threads for number in range(threads + 1)]
    parts = (UpdatedPart * threads)(
        *(UpdatedPart(begin, end, *addresses, streams.bits is not None) for begin, end in pairwise(bounds))
    )
    move = loaded.library.move_streams
    move.argtypes, move.restype = (ctypes.c_void_p, ctypes.c_int64), None
    return lambda: move(ctypes.addressof(parts), threads)


def deepspeed_update(streams: AdamWStreams) -> Callable[[], object] | None:
    """Its optimizer takes no factor, so the gradients are multiplied before, as its engine does; then bf16 is cast."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    parameter = torch.nn.Parameter(streams.master)
    parameter.grad = streams.grad
    optimizer = adam([parameter], lr=FACTORS.lr, betas=FACTORS.betas, eps=FACTORS.eps, weight_decay=0.1)
    rounded = streams.rounded
    assert rounded is not None

    def update() -> None:
        streams.grad.mul_(1.0)  # by the clip factor
        optimizer.step()
        rounded.copy_(parameter.data)

    return update


def streams_of(count: int, states: torch.dtype) -> AdamWStreams:
    master, exp_avg, exp_avg_sq, grad = (torch.full((count,), value) for value in (1.0, 1e-3, 1e-6, 1e-3))
    bits = RandomBits(0, "weight", ElementIndex(0, count, count, 0)) if states == torch.bfloat16 else None
    rounded = torch.empty(count, dtype=torch.bfloat16)
    return AdamWStreams(master, exp_avg.to(states), exp_avg_sq.to(states), grad, rounded, bits)


def measure(updates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round of each update; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(rounds + 1):
        for name, update in updates.items():
            begun = time.perf_counter()
            update()
            if number:  # the first touches memory and starts threads
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def print_table(seconds: Mapping[str, Sequence[float]], count: int, size: int) -> None:
    """Prints medians and best rounds, and speeds beside the first row's; an update moves `size` bytes of an element."""
    print("| | G elements/s | best round | GB/s of it | speed beside memory alone | best rounds |")
    print("|---|---|---|---|---|---|")
    alone = next(iter(seconds.values()))
    for name, found in seconds.items():
        rate, best = count / median(found), count / min(found)
        ratio = median(other / each for other, each in zip(alone, found, strict=True))
        rates = f"{rate / 1e9:.3f} | {best / 1e9:.3f} | {best * size / 1e9:.1f}"
        print(f"| {name} | {rates} | {ratio:.2f} | {min(alone) / min(found):.2f} |")


@click.command()
@click.option("--millions", default=64, show_default=True, help="Elements, in millions.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(millions: int, rounds: int, threads: int) -> None:
    """Print medians of the rounds, the best of them, and ratios to memory alone."""
    torch.set_num_threads(threads)
    ours = adamw_rule(torch.device("cpu"))
    if not isinstance(ours, NativeRule):
        raise click.ClickException("no C compiler")
    cpu, load = read_cpu(), ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{cpu.model}: {', '.join(cpu.instruction_sets)}; {millions} M elements, {threads} threads, {rounds} rounds;")
    print(f"load {load}")
    for states in (torch.float32, torch.bfloat16):
        streams = streams_of(millions * 1_000_000, states)
        updates: dict[str, Callable[[], object]] = {
            "memory alone": memory_alone(streams, threads),
            "tk, in C": partial(ours, streams, FACTORS),
        }
        if states == torch.float32:  # others have no bf16 moments that are rounded so
            updates["torch fused, then bf16"] = partial(TorchRule(streams.master.device), streams, FACTORS)
        deepspeed = deepspeed_update(streams) if states == torch.float32 else None
        if deepspeed:
            updates["DeepSpeed CPUAdam, then bf16"] = deepspeed
        print(f"\n{str(states).removeprefix('torch.')} states\n")
        print_table(measure(updates, rounds), streams.master.numel(), PARAMETER_BYTES + 4 * states.itemsize)


if __name__ == "__main__":
    main()
