"""The sections of bench_serving.py about the machine's limits: memory read at batch 1; start and resident memory."""

from statistics import median
from typing import Final

from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.serving.engines import engine
from tk.benchmarks.serving.in_turn import Contestant, Promise, medians_in_turn
from tk.benchmarks.serving.readers import readers
from tk.benchmarks.serving.setup import Setup, weight_bytes
from tk.benchmarks.serving.start import measure_start
from tk.infer.engine.kernels.native.binding.library import load_kernels

READ_BOUND: Final = 0.92  # of the best reader
READY_BOUND: Final = 1.5  # seconds
RESIDENT_BOUND: Final = 150.0  # MiB beside the weights
_MIB: Final = 2**20


def read(setup: Setup) -> list[Promise]:
    """Compares the bytes of weights that decoding at batch 1 reads per second with the best reader's."""
    _, per_token = weight_bytes(setup.model)
    with engine("batch 1", setup.model, threads=setup.threads, max_model_len=256) as own:
        kernels = load_kernels(own.llm.model_info().kernels.rpartition(" ")[2])
        if kernels is None or kernels.refusal():
            setup.show("The readers are left out: the engine does not run native kernels.")
            return []
        contestants: list[Contestant] = [own, *readers(kernels, setup.threads)]
        speeds = medians_in_turn(contestants, SpeedWorkload(1, 16, 128), setup.runs, setup.show)
    found = {name: each["read"] for name, each in speeds.items() if "read" in each}
    found[own.name] = per_token * speeds[own.name]["decode"]
    setup.show(f"{per_token / 1e6:.0f} MB of weights per token; decode {speeds[own.name]['decode']:.1f} tokens/s")
    setup.show("read, GB/s: " + "   ".join(f"{name} {rate / 1e9:.1f}" for name, rate in found.items()))
    best = max(rate for name, rate in found.items() if name != own.name)
    return [Promise("weights read per second at batch 1 beside the best reader", found[own.name] / best, READ_BOUND)]


def start(setup: Setup) -> list[Promise]:
    """Measures starts of `tk serve`, and its memory before the first request."""
    whole, _ = weight_bytes(setup.model)
    starts = [measure_start(setup.model, setup.threads) for _ in range(setup.runs)]
    ready = median(one.ready_seconds for one in starts)
    resident, own = (median(values) for values in zip(*((o.resident_bytes, o.own_bytes) for o in starts), strict=True))
    setup.show(f"ready after {ready:.2f} s; weights {whole / _MIB:.0f} MiB")
    setup.show(f"resident {resident / _MIB:.0f} MiB, {own / _MIB:.0f} MiB with shared pages counted once")
    return [
        Promise("seconds from start to ready", ready, READY_BOUND, most=True),
        Promise("MiB resident beside the weights", (resident - whole) / _MIB, RESIDENT_BOUND, most=True),
    ]
