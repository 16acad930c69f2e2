"""The masks of a step's rows: they are made and sent while the workers compute the logits of these rows."""

from ...core.errors import TkError
from ..scheduling.live_request import LiveRequest
from ..scheduling.step_in_flight import StepInFlight
from .worker_group import WorkerGroup


def send_masks(step: StepInFlight | None, workers: WorkerGroup, timeout: float) -> list[tuple[LiveRequest, TkError]]:
    """Makes the masks of the step that was sent last, if it needs any, and sends them.

    Args:
        step: the step, all tokens before which are known; None = no step is in flight.
        workers: the workers, which wait for the masks.
        timeout: the time to read them, in seconds, after which a worker counts as dead.

    Returns:
        The requests whose constraints cannot go on, with the reasons.
    """
    made = None if step is None else step.masks()
    if made is None:
        return []
    masks, failed = made
    workers.send_masks(masks, timeout)
    return failed
