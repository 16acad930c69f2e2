"""The section of bench_serving.py about quantized weights: decoding beside llama.cpp with as many bits."""

from contextlib import ExitStack
from typing import Final

from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.serving.engines import engine
from tk.benchmarks.serving.in_turn import Contestant, Promise, compared, medians_in_turn
from tk.benchmarks.serving.setup import QUANTIZED, Setup

BOUNDS: Final = {"int8": 1.5, "int4": 1.2}  # times the speed of the peer in QUANTIZED


def weights(setup: Setup) -> list[Promise]:
    """Measures decoding at batch 1 with weights in 8 bits, in 4 bits, and in the model's own dtype."""
    length = setup.prompt_tokens + setup.new_tokens
    peers = {peer.name: peer for peer in setup.peers}
    with ExitStack() as stack:
        contestants: list[Contestant] = []
        for dtype in (*BOUNDS, "auto"):
            options = {"threads": setup.threads, "max_model_len": length, "weight_dtype": dtype}
            contestants.append(stack.enter_context(engine(_own(dtype), setup.model, **options)))
            if QUANTIZED.get(dtype) in peers:
                contestants.append(peers[QUANTIZED[dtype]])
        workload = SpeedWorkload(1, setup.prompt_tokens, setup.new_tokens)
        speeds = medians_in_turn(contestants, workload, setup.runs, setup.show)
    promises = []
    for dtype, bound in BOUNDS.items():
        names = [name for name in (_own(dtype), QUANTIZED[dtype], _own("auto")) if name in speeds]
        setup.show(f"batch   1 decode   {compared({name: speeds[name] for name in names}, 'decode')}")
        if QUANTIZED[dtype] in speeds:
            ratio = speeds[_own(dtype)]["decode"] / speeds[QUANTIZED[dtype]]["decode"]
            promises.append(Promise(f"decode at batch 1 with {dtype} weights beside {QUANTIZED[dtype]}", ratio, bound))
    return promises


def _own(dtype: str) -> str:
    return f"tk {dtype} weights"
