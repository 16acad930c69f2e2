"""The check of `--batch-invariant`: one sequence is computed in many ways, and each must have the bits of the others.

A prompt gives the logits of all its positions. They are computed again: cut, alone, and beside one another as steps of
single tokens. A token that is computed again stores the key that is there already, so all ways share one cache.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from ....core.casts import Array
from ....core.integers import ceil_div
from ..job import Job
from ..step.running_plan import NO_ADAPTER, RunningPlan
from ..step.sampling_rows import SamplingRows

Logits = Callable[[RunningPlan], Array]  # computes a step: `Backend.logits`

_LONGEST: Final = 72  # tokens of the prompt
_CUTS: Final = (5, 6, 37)  # positions before which it is cut
_COUNTS: Final = (1, 2, 3, 8, 17, 64)  # single tokens of a step


def why_not_invariant(logits: Logits, job: Job, vocab_size: int, slot: int = NO_ADAPTER) -> str:
    """Returns where logits depend on what is computed with them; "" if all have the same bits. Every rank calls it.

    Args:
        logits: those of a backend, before it serves: the first blocks of its cache are written.
        job: the backend's job.
        vocab_size: the number of tokens.
        slot: that of the adapter that the sequence has, if it has one.
    """
    room = min(job.num_blocks, job.num_twins or job.num_blocks) * job.block_size
    length = min(_LONGEST, room, job.max_model_len or room, job.max_batched_tokens)
    sequence = ProbedSequence(length, job.block_size, vocab_size, job.num_twins > 0, slot)
    expected = logits(sequence.step([range(length)]))
    for what, spans in _ways(length, job.block_size):
        found = logits(sequence.step(spans))
        wanted = expected[np.concatenate([np.array(span) for span in spans])]
        if not np.array_equal(found.view(np.uint32), wanted.view(np.uint32)):
            return f"the logits of {what} have other bits than in a prompt of {length} tokens"
    return ""


def _ways(length: int, block_size: int) -> Iterator[tuple[str, Sequence[range]]]:
    """Yields steps that compute a part of the sequence again, as spans of positions, and their names."""
    cuts = [0, *(cut for cut in _CUTS if cut < length), length]
    for first, stop in pairwise(cuts):
        yield f"a part of {stop - first} tokens", [range(first, stop)]
    # The first token of a block would empty it.
    inside = [position for position in range(length) if position % block_size]
    for count in sorted({min(count, len(inside)) for count in _COUNTS}):
        yield f"{count} tokens beside one another", [range(each, each + 1) for each in inside[-count:]]
    if len(inside) > 2:
        # The last way: the prompt empties the blocks that it begins, and lacks two tokens for those beside it.
        singles = [range(inside[i], inside[i] + 1) for i in (0, len(inside) // 2)]
        yield "a prompt between two single tokens", [singles[0], range(length - 2), singles[1]]


class ProbedSequence:
    """A sequence of different tokens in the first blocks of the cache.

    Args:
        length: the number of its tokens.
        block_size: the tokens of a block.
        vocab_size: the number of tokens that there are.
        shares_twins: whether blocks get twins by plans: a cache without such twins has no place for them.
        slot: that of its adapter, if it has one.
    """

    def __init__(
        self, length: int, block_size: int, vocab_size: int, shares_twins: bool = False, slot: int = NO_ADAPTER
    ) -> None:
        self._tokens = (np.arange(length, dtype=np.int32) * 31 + 7) % np.int32(vocab_size)
        self._block_size, self._slot = block_size, slot
        self._blocks = np.arange(1, 1 + ceil_div(length, block_size), dtype=np.int32)
        self._twins = np.repeat(self._blocks[:, None], 2, axis=1) if shares_twins else np.empty((0, 2), np.int32)

    def step(self, spans: Sequence[range]) -> RunningPlan:
        """Returns the step that computes spans of positions, with the logits of each."""
        positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int32) for span in spans])
        scored = np.stack([np.arange(len(positions)), self._tokens[positions], np.full(len(positions), -1)], axis=1)
        return RunningPlan(
            tokens=self._tokens[positions],
            positions=positions,
            slots=positions + np.int32(self._block_size),
            span_length=np.array([len(span) for span in spans], np.int32),
            block_tables=np.repeat(self._blocks[None], len(spans), axis=0),
            rows=SamplingRows.scoring(scored.astype(np.int32)),
            twins=self._twins,
            adapters=np.full(0 if self._slot == NO_ADAPTER else len(spans), self._slot, np.int32),
        )
