"""The interface of a backend: it prepares a program once and then runs whole steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..step.step_plan import Array, SamplerOutput, StepPlan
from .engine_line import EngineLine, WentOn

Masks = Callable[[], Array]  # waits for the masks of a step's rows: see `sampler.run_sampler`


def no_masks() -> Array:
    """Fails: the masks of a step that has none."""
    raise AssertionError("a step without masks waits for them")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of a rank.

    Attributes:
        num_blocks: the number of blocks that the scheduler allocates; one more, the null block 0, stays zero.
        block_size: the number of tokens of a block.
        dtype: the name of the cache's dtype (see `EngineOptions.kv_dtype`).
        num_twins: how many blocks can have a twin in int8, of a dtype with twins, numbered from 1: plans say which
            (`StepPlan.twins`). 0: each block has the twin of its own number.
    """

    num_blocks: int
    block_size: int
    dtype: str
    num_twins: int = 0


class Backend(Protocol):
    """A rank's prepared program, with its packed weights and its cache.

    Attributes:
        kernels: the backend and its instruction set, for example "native avx2" or "aten".
        kv_bytes: the bytes of the cache.
        samples: whether `step` returns the sampled tokens on this rank.
    """

    kernels: str
    kv_bytes: int
    samples: bool

    def step(self, plan: StepPlan, masks: Masks = no_masks) -> SamplerOutput | None:
        """Computes a step, stores its keys and values; returns the sampler's output, None on ranks that do not sample.

        Rank 0 always samples; ranks that do agree to the bit.

        Args:
            plan: the plan of the step.
            masks: is called once before rows are sampled of which one has a mask, on ranks that sample.
        """

    def sample_again(self, masks: Array, rows: Array) -> SamplerOutput:
        """Samples the rows of the last step again, of which some had candidates, on ranks that sample.

        Args:
            masks: uint32 [M, W].
            rows: the numbers of the rows that get these masks: int32 [M]. The results of other rows are of no use.
        """

    def go_on(self, line: EngineLine) -> WentOn | None:
        """Carries out further steps, and sends their results, as long as the engine's next message is `next_step`.

        The last step sampled a token for each of its spans; its plan advances in place (see `StepPlan`). If rows have
        candidates, its results were sent, and the tokens that the engine chooses must come behind `next_step`. Returns
        None if nothing has changed.
        """

    def logits(self, plan: StepPlan) -> Array:
        """Computes a step as `step` does; returns the raw logits of its rows on every rank: fp32 [R, vocab_size]."""
