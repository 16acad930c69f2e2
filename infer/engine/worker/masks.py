"""Constraints beside the workers: what may follow, found while they compute logits, or after they have sampled.

A mask costs as much time as a tenth of a row of a small model. So workers send the best tokens of a row without a mask,
where the first of them that may follow is the token that the mask would lead to. Only if none may, a mask is made.
"""

from collections.abc import Sequence
from dataclasses import replace

from ....core.errors import TkError
from ..schedule.live_request import LiveRequest
from ..schedule.step_in_flight import StepInFlight
from ..step.sampler_output import SamplerOutput
from .worker_group import WorkerGroup

Failures = Sequence[tuple[LiveRequest, TkError]]  # requests whose constraints cannot go on, with the reasons


def send_masks(step: StepInFlight | None, workers: WorkerGroup) -> Failures:
    """Makes the masks that the step that was sent last needs before its rows are sampled, and sends them.

    Args:
        step: the step, all tokens before which are known; None = no step is in flight.
        workers: the workers, which wait for the masks.

    Returns:
        The requests whose constraints cannot go on, with the reasons.
    """
    made = None if step is None else step.masks()
    if made is None:
        return []
    workers.send_masks(made.words)
    return made.failed


def receive_tokens(step: StepInFlight, workers: WorkerGroup) -> tuple[SamplerOutput, Failures]:
    """Waits for the results of the oldest step without them, and chooses tokens among candidates.

    Args:
        step: the step.
        workers: the workers, which wait for the tokens if there are candidates.

    Returns:
        The results, and the requests whose constraints cannot go on, with the reasons.

    Raises:
        WorkerDied: see `WorkerGroup.receive`.
    """
    result = workers.receive()
    if not result.candidates.size:
        workers.send_tokens(result.token_ids)
        return result, []
    failed: Failures = []
    tokens, refused = step.choose(result)
    if refused:
        made = step.masks_of(refused)
        workers.sample_again(made.rows, made.words)
        tokens[refused] = workers.receive().token_ids[refused]
        failed = made.failed
    workers.send_tokens(tokens, are_chosen=True)
    return replace(result, token_ids=tokens), failed
