"""The section of bench_serving.py about quantized weights: beside bf16, and beside peers with as many bits."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from tk.benchmarks.peers.token_clock import Speeds
from tk.benchmarks.serving.engines import engine
from tk.benchmarks.serving.in_turn import Contestant, Promise, compared, medians_in_turn
from tk.benchmarks.serving.setup import INT8, Q4_0, Q8_0, QUANTIZED, Setup

BESIDE: Final = {Q8_0: {"decode": 1.5}, Q4_0: {"decode": 1.2}, INT8: {"decode": 1.1, "prefill": 0.85}}  # times a peer's
AT_BATCH_1: Final = (Q8_0, Q4_0)  # peers that are run at no other batch size
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
            for dtype in (*QUANTIZED, "auto")
        ]
        for workload in setup.workloads():
            speeds = medians_in_turn([*own, *_peers(setup, workload.batch)], workload, setup.runs, setup.show)
            for kind in ("prefill", "decode"):
                setup.show(f"batch {workload.batch:3} {kind:8} {compared(speeds, kind)}")
            promises += _promises(workload.batch, speeds)
    return promises


def _promises(batch: int, speeds: dict[str, Speeds]) -> list[Promise]:
    promises = []
    for dtype, peers in QUANTIZED.items():
        found, whole = speeds[_own(dtype)], speeds[_own("auto")]
        kinds = {"prefill": PREFILL[dtype], "decode": DECODE[dtype].get(batch)}
        promises += [
            Promise(f"{kind} at batch {batch} with {dtype} weights beside bf16", found[kind] / whole[kind], least)
            for kind, least in kinds.items()
            if least
        ]
        for peer in speeds.keys() & peers:
            promises += [
                Promise(f"{kind} at batch {batch} with {dtype} weights beside {peer}", found[kind] / theirs, bound)
                for kind, bound in BESIDE[peer].items()
                for theirs in [speeds[peer][kind]]
            ]
    return promises


def _peers(setup: Setup, batch: int) -> Sequence[Contestant]:
    return [peer for peer in setup.peers if peer.name in BESIDE and (batch == 1 or peer.name not in AT_BATCH_1)]


def _own(dtype: str) -> str:
    return f"tk {dtype} weights"
