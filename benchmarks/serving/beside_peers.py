"""The sections of bench_serving.py that run peers: prefill, decoding, and decoding after long prompts."""

from collections.abc import Iterator
from typing import Final

from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload
from tk.benchmarks.serving.engines import engine
from tk.benchmarks.serving.in_turn import Promise, best_of, compared, medians_in_turn
from tk.benchmarks.serving.setup import LLAMACPP, LONGEST, OPENVINO, VLLM, Setup
from tk.core.integers import ceil_div
from tk.infer.engine.options import EngineOptions

OWN: Final = "tk"
DECODE_BOUNDS: Final = {(LLAMACPP, 1): 1.0, (OPENVINO, 8): 1.2, (OPENVINO, 32): 1.1}  # times a peer's speed at a batch
VLLM_BOUND: Final = 1.3
PREFILL_BOUND: Final = 0.95  # times the best peer's speed
LONG_BOUND: Final = 2.0
LONG_PROMPT: Final = 3000
LONG_BATCH: Final = 8
STEPS: Final = 16  # of decoding in a window after long prompts
STAGGER: Final = 64  # steps in which some long prompts are computed while others are continued


def prefill(setup: Setup) -> list[Promise]:
    """Measures the time to the first token of all sequences."""
    promises = []
    for batch, speeds in _each_batch(setup, "prefill", 1):
        best = best_of(speeds, "prefill", [peer.name for peer in setup.peers])
        if best is not None:
            ratio = speeds[OWN]["prefill"] / best
            promises.append(Promise(f"prefill at batch {batch} beside the best peer", ratio, PREFILL_BOUND))
    return promises


def decode(setup: Setup) -> list[Promise]:
    """Measures decoding while all sequences run."""
    promises = []
    for batch, speeds in _each_batch(setup, "decode", setup.new_tokens):
        bounds = {name: bound for (name, at), bound in DECODE_BOUNDS.items() if at == batch} | {VLLM: VLLM_BOUND}
        for name, bound in bounds.items():
            if name in speeds:
                ratio = speeds[OWN]["decode"] / speeds[name]["decode"]
                promises.append(Promise(f"decode at batch {batch} beside {name}", ratio, bound))
    return promises


def long(setup: Setup) -> list[Promise]:
    """Measures decoding after long prompts with an int8 cache.

    The prompts are computed once; the runs are parts of one continuation.
    """
    workload = SpeedWorkload(LONG_BATCH, LONG_PROMPT, STAGGER + STEPS * setup.runs, windows=setup.runs)
    with engine(OWN, setup.model, threads=setup.threads, kv_dtype="int8", max_model_len=LONGEST) as own:
        speeds = medians_in_turn([own, *setup.peers], workload, 1, setup.show)
    for kind in ("prefill", "decode"):
        setup.show(f"batch {LONG_BATCH}, {LONG_PROMPT} tokens of prompt, {kind:<8} {compared(speeds, kind)}")
    best = best_of(speeds, "decode", [peer.name for peer in setup.peers])
    if best is None:
        return []
    ratio = speeds[OWN]["decode"] / best
    return [Promise(f"decode after {LONG_PROMPT} tokens beside the best peer", ratio, LONG_BOUND)]


def _each_batch(setup: Setup, kind: str, new_tokens: int) -> Iterator[tuple[int, dict[str, Speeds]]]:
    """Yields batch sizes and the median speeds of all contestants, and shows those of a kind.

    The cache has room for the largest batch, and was written before: as in a server that has run for a while, no run
    waits for the system to clear memory.
    """
    length, most = setup.prompt_tokens + setup.new_tokens, max(setup.batches)
    blocks = most * (ceil_div(length, EngineOptions.block_size) + 1)
    with engine(OWN, setup.model, threads=setup.threads, max_model_len=length, kv_blocks=blocks) as own:
        own.run(SpeedWorkload(most, setup.prompt_tokens, setup.new_tokens))
        for batch in setup.batches:
            workload = SpeedWorkload(batch, setup.prompt_tokens, new_tokens)
            speeds = medians_in_turn([own, *setup.peers], workload, setup.runs, setup.show)
            setup.show(f"batch {batch:>3} {kind:<8} {compared(speeds, kind)}")
            yield batch, speeds
