"""The interface of a backend: it prepares a program once and then runs whole steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ....core.casts import Array
from ..program.adapters import RankAdapter
from ..step.channel import Channel
from ..step.running_plan import RunningPlan
from ..step.sampler_output import SamplerOutput

Masks = Callable[[], Array]  # waits for the masks of a step's rows: see `sampler.run_sampler`


def no_masks() -> Array:
    """Fails: the masks of a step that has none."""
    raise AssertionError("a step without masks waits for them")


@dataclass(frozen=True, slots=True)
class DecodedAhead:
    """Where a backend that decodes ahead has stopped.

    Attributes:
        tokens: the tokens of its last step, int32 [R]; None: the engine chooses them, and has not yet.
        has_next: whether it took `NEXT_STEP` from the channel, for the step that follows when the tokens are known.
        new_blocks: the spans that went on in a new block, and the blocks, in their order: int32 [.., 2].
        newest: see `PersistentBatch.leave`, where `GivenTokens` left the plan behind; None: nothing did.
    """

    tokens: Array | None
    has_next: bool = False
    new_blocks: Array = field(default_factory=lambda: np.empty((0, 2), np.int32), compare=False)
    newest: Array | None = field(default=None, compare=False)


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

    def step(self, plan: RunningPlan, masks: Masks = no_masks, channel: Channel | None = None) -> SamplerOutput | None:
        """Computes a step, stores its keys and values; returns the sampler's output, None on ranks that do not sample.

        Rank 0 always samples; ranks that do agree to the bit.

        Args:
            plan: the plan of the step.
            masks: is called once before rows are sampled of which one has a mask, on ranks that sample.
            channel: where ranks that sample send the results, as soon as they are there; None: nowhere.
        """

    def sample_again(self, masks: Array, rows: Array) -> SamplerOutput:
        """Samples the rows of the last step again, of which some had candidates, on ranks that sample.

        Args:
            masks: uint32 [M, W].
            rows: the numbers of the rows that get these masks: int32 [M]. The results of other rows are of no use.
        """

    def decode_ahead(self, plan: RunningPlan, channel: Channel) -> DecodedAhead | None:
        """Computes further steps, and sends their results, as long as the engine's next frame is `NEXT_STEP`.

        Only backends that can do so without the worker have it. Some also take it with new blocks, or `GivenTokens`. If
        rows have candidates, the tokens that the engine chooses must come behind it. None: nothing has changed.

        Args:
            plan: the plan of the last step, whose results were sent; it advances.
        """
        return None

    def pack_adapter(self, slot: int, adapter: RankAdapter) -> Callable[[], object]:
        """Packs an adapter for a slot, on any thread, while steps are computed.

        Args:
            slot: a number below `Job.adapter_slots`.
            adapter: the rank's part of the adapter, in the dtype of the job.

        Returns:
            What puts it there, in place of the one that the slot had, between two steps; it is quick and cannot fail.
        """
        raise AssertionError("a backend that serves adapters has a method of its own")

    def drop_adapter(self, slot: int) -> None:
        """Frees the memory of the adapter in a slot, between two steps; later ones have no row with it."""
        raise AssertionError("a backend that serves adapters has a method of its own")

    def logits(self, plan: RunningPlan) -> Array:
        """Computes a step as `step` does; returns the raw logits of its rows on every rank: fp32 [R, vocab_size]."""
