"""Steps that follow one another on the device: the next one starts before the results of the one before are read."""

from collections.abc import Callable

import numpy as np

from ......core.casts import Array
from ....step.channel import Channel
from ....step.running_plan import RunningPlan
from ....step.sampler_output import SamplerOutput
from .result_copies import ResultCopy

# Starts the step at some positions that follows the last one, and the copy of its results.
Follow = Callable[[RunningPlan, Array], ResultCopy]


def decode_ahead(plan: RunningPlan, channel: Channel, tokens: Array, follow: Follow, block_size: int) -> Array | None:
    """Computes steps, and sends their results, as long as the engine's next frame is `NEXT_STEP`.

    Args:
        plan: the plan of the last step, whose results were sent; it advances.
        channel: the rank's socket to the engine.
        tokens: the tokens of that step, which the device has already.
        follow: starts a step.
        block_size: the tokens of a block.

    Returns:
        The tokens of the last step; None if there was none.
    """
    started = 0  # steps, of which those before `ended` have sent their results
    ended = 0
    first = plan.positions.copy()
    waiting: list[ResultCopy] = []
    while True:
        while len(waiting) < 2 and channel.take_next_step(wait=not waiting):
            started += 1
            waiting.append(follow(plan, first + np.int32(started)))
        if not waiting:
            return tokens if ended else None
        result_2R, _ = waiting.pop(0).wait()
        plan.advance(tokens, block_size)
        tokens, ended = result_2R[0].copy(), ended + 1
        channel.send_result(SamplerOutput.of_tokens(tokens, result_2R[1].astype(np.uint8)))
