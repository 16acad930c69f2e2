"""The interface of a backend: it prepares a program once and then runs whole steps."""

from dataclasses import dataclass
from typing import Protocol

from ..scheduling.step_plan import Array, SamplerOutput, StepPlan


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of a rank.

    Attributes:
        num_blocks: the number of blocks that the scheduler allocates; one more, the null block 0, stays zero.
        block_size: the number of tokens of a block.
        dtype: the name of the cache's dtype (see `EngineOptions.kv_dtype`).
    """

    num_blocks: int
    block_size: int
    dtype: str


class Backend(Protocol):
    """A rank's prepared program, with its packed weights and its cache.

    Attributes:
        kernels: the backend and its instruction set, for example "native avx2" or "aten".
        kv_bytes: the bytes of the cache.
    """

    kernels: str
    kv_bytes: int

    def step(self, plan: StepPlan) -> SamplerOutput | None:
        """Computes a step, stores its keys and values; returns the sampler's output on rank 0, else None."""

    def logits(self, plan: StepPlan) -> Array:
        """Computes a step as `step` does; returns the raw logits of its rows on every rank: fp32 [R, vocab_size]."""
