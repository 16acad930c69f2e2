"""The sections of bench_serving.py about the formats of keys and values, each beside a cache in bf16."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.serving.engines import EngineContestant, engine
from tk.benchmarks.serving.in_turn import Promise, ratios
from tk.benchmarks.serving.setup import LONGEST, Setup

FORMATS: Final = ("fp8", "int8", "k8v4", "int4", "bf16")
SHORT_BOUND: Final = 0.97
LONG_BOUND: Final = 1.0
LONG_PROMPT: Final = 3000
LONG_BATCH: Final = 8
STEPS: Final = 32  # of decoding after long prompts


def kv(setup: Setup) -> list[Promise]:
    """Compares prefill and decoding."""
    with _engines(setup, setup.prompt_tokens + setup.new_tokens) as contestants:
        kinds = ("prefill", "decode")
        return ratios(contestants, setup.workloads(), kinds, SHORT_BOUND, setup.runs, setup.show)


def long_kv(setup: Setup) -> list[Promise]:
    """Compares decoding after long prompts, which are computed once: then the prefix cache holds them."""
    with _engines(setup, LONGEST) as opened:
        contestants = [EngineContestant(one.name, one.llm, prompt_seed=0) for one in opened]
        for one in contestants:
            one.run(SpeedWorkload(LONG_BATCH, LONG_PROMPT, 1))
        workload, where = SpeedWorkload(LONG_BATCH, LONG_PROMPT, STEPS), f" after {LONG_PROMPT} tokens"
        return ratios(contestants, [workload], ("decode",), LONG_BOUND, setup.runs, setup.show, where)


@contextmanager
def _engines(setup: Setup, max_model_len: int) -> Iterator[list[EngineContestant]]:
    """Opens an engine per format for a with block."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                engine(f"{name} KV", setup.model, threads=setup.threads, max_model_len=max_model_len, kv_dtype=name)
            )
            for name in FORMATS
        ]
