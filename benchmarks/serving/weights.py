"""The section of bench_serving.py about quantized weights: beside bf16, and beside llama.cpp with as many bits."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from tk.benchmarks.peers.token_clock import Speeds
from tk.benchmarks.serving.engines import engine
from tk.benchmarks.serving.in_turn import Contestant, Promise, compared, medians_in_turn
from tk.benchmarks.serving.setup import QUANTIZED, Setup

BOUNDS: Final = {"int8": 1.5, "int4": 1.2}  # times the speed of the peer in QUANTIZED at batch 1
PREFILL: Final = {"int8": 0.8, "int4": 0.62}  # of the speed of weights in bf16, at every batch size
DECODE: Final = {"int8": {1: 2.0, 8: 1.15, 32: 1.0}, "int4": {1: 2.6, 8: 1.45, 32: 1.0}}  # the same, by batch size


def weights(setup: Setup) -> list[Promise]:
    """Measures prompts and decoding with weights in 8 bits, in 4 bits, and in the model's own dtype."""
    length = setup.prompt_tokens + setup.new_tokens
    options = {"threads": setup.threads, "max_model_len": length}
    promises = []
    with ExitStack() as stack:
        own: list[Contestant] = [
            stack.enter_context(engine(_own(dtype), setup.model, weight_dtype=dtype, **options))
            for dtype in (*BOUNDS, "auto")
        ]
        for workload in setup.workloads():
            contestants = [*own, *_peers(setup)] if workload.batch == 1 else own
            speeds = medians_in_turn(contestants, workload, setup.runs, setup.show)
            for kind in ("prefill", "decode"):
                setup.show(f"batch {workload.batch:3} {kind:8} {compared(speeds, kind)}")
            promises += _promises(workload.batch, speeds)
    return promises


def _promises(batch: int, speeds: dict[str, Speeds]) -> list[Promise]:
    promises = []
    for dtype, bound in BOUNDS.items():
        found, whole = speeds[_own(dtype)], speeds[_own("auto")]
        kinds = {"prefill": PREFILL[dtype], "decode": DECODE[dtype].get(batch)}
        promises += [
            Promise(f"{kind} at batch {batch} with {dtype} weights beside bf16", found[kind] / whole[kind], least)
            for kind, least in kinds.items()
            if least
        ]
        if peer := speeds.get(QUANTIZED[dtype]):
            ratio = found["decode"] / peer["decode"]
            promises.append(Promise(f"decode at batch 1 with {dtype} weights beside {QUANTIZED[dtype]}", ratio, bound))
    return promises


def _peers(setup: Setup) -> Sequence[Contestant]:
    return [peer for peer in setup.peers if peer.name in QUANTIZED.values()]


def _own(dtype: str) -> str:
    return f"tk {dtype} weights"
