"""The pipeline schedules: pure functions from (pp, virtual stages, micro-batches) to the actions of every rank.

gpipe         all forwards, then all backwards (arXiv 1811.06965); with virtual stages breadth-first, one model
              chunk after another (arXiv 2211.05953)
1f1b          PipeDream-Flush (arXiv 2104.04473, section 2.1): one forward, one backward, few activations
interleaved   1f1b over several model chunks per rank (arXiv 2104.04473, section 2.2): a smaller bubble
zb-h1         1f1b whose weight gradients fill the bubble (arXiv 2401.10241, section 2.1), at 1f1b's peak memory
forward-only  evaluation
"""

from collections.abc import Callable

from ...core.errors import ParallelError
from .actions import Action, Kind, Schedule

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")


def make_schedule(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> Schedule:
    """Returns the schedule `name` (one of NAMES, or "forward-only") for any number of micro-batches.

    Raises:
        ParallelError: the schedule does not exist, or not with these numbers; the message names numbers that fit.
    """
    _check(name, pp, virtual_stages, num_micro_batches)
    ranks = tuple(_GENERATORS[name](rank, pp, virtual_stages, num_micro_batches) for rank in range(pp))
    return Schedule(name, pp, virtual_stages, num_micro_batches, ranks)


def _check(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> None:
    if name not in _GENERATORS:
        raise ParallelError(f"schedule = {name!r} does not exist. Use one of {', '.join(NAMES)}.")
    for key, value in (("pp", pp), ("virtual_stages", virtual_stages), ("num_micro_batches", num_micro_batches)):
        if value < 1:
            raise ParallelError(f"{key} = {value}; it must be 1 or more.")
    if virtual_stages > 1 and pp == 1:
        raise ParallelError(
            f"virtual_stages = {virtual_stages} with pp = 1: virtual stages need 2 or more pipeline ranks. "
            "Use virtual_stages = 1 or a larger pp."
        )
    if virtual_stages > 1 and name in ("1f1b", "zb-h1"):
        raise ParallelError(
            f"schedule = {name!r} has one stage per rank, but virtual_stages = {virtual_stages}. "
            "Use virtual_stages = 1, or schedule = 'interleaved'."
        )
    if virtual_stages == 1 and name == "interleaved":
        raise ParallelError(
            "schedule = 'interleaved' needs virtual_stages >= 2, but virtual_stages = 1. "
            "Use schedule = '1f1b', or virtual_stages = 2 (pp x virtual_stages <= num_hidden_layers)."
        )


def _gpipe(rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    stages = range(rank, pp * virtual_stages, pp)
    micro_batches = range(num_micro_batches)
    return (
        *(Action(Kind.FORWARD, stage, index) for stage in stages for index in micro_batches),
        *(Action(Kind.BACKWARD, stage, index) for stage in reversed(stages) for index in micro_batches),
    )


def _1f1b(rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    order = [(rank, index) for index in range(num_micro_batches)]
    return _one_forward_one_backward(order, order, pp - rank - 1)


def _interleaved(rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    stages = range(rank, pp * virtual_stages, pp)
    sizes = _group_sizes(pp, num_micro_batches)
    forwards, backwards = _by_groups(stages, sizes), _by_groups(stages[::-1], sizes)
    return _one_forward_one_backward(forwards, backwards, (virtual_stages - 1) * sizes[0] + 2 * (pp - rank - 1))


def _zb_h1(rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    """1f1b whose weight gradients are computed `rank` micro-batches late.

    Every rank then has pp micro-batches in flight, as the first rank of 1f1b has, and the late weight gradients fill
    the bubble at the end of the rank's step.
    """
    actions: list[Action] = []
    for action in _1f1b(rank, pp, virtual_stages, num_micro_batches):
        if action.kind is Kind.FORWARD:
            actions.append(action)
            continue
        actions.append(Action(Kind.BACKWARD_INPUT, rank, action.micro_batch))
        if action.micro_batch >= rank:
            actions.append(Action(Kind.BACKWARD_WEIGHT, rank, action.micro_batch - rank))
    late = range(max(0, num_micro_batches - rank), num_micro_batches)
    return (*actions, *(Action(Kind.BACKWARD_WEIGHT, rank, index) for index in late))


def _forward_only(rank: int, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    stages = range(rank, pp * virtual_stages, pp)
    order = _by_groups(stages, _group_sizes(pp, num_micro_batches))
    return tuple(Action(Kind.FORWARD, stage, index) for stage, index in order)


Order = list[tuple[int, int]]  # (stage, micro-batch)


def _group_sizes(pp: int, num_micro_batches: int) -> list[int]:
    """Returns the sizes of the groups of micro-batches that go through one model chunk before the next chunk's turn.

    A group has pp micro-batches, or a few more if pp does not divide their number. With fewer than pp, ranks would wait
    in every group.
    """
    num_groups = max(1, num_micro_batches // pp)
    small, num_larger = divmod(num_micro_batches, num_groups)
    return [small + (index < num_larger) for index in range(num_groups)]


def _by_groups(stages: range, sizes: list[int]) -> Order:
    """Returns the order in which each group of micro-batches goes through all of a rank's stages."""
    order: Order = []
    first = 0
    for size in sizes:
        order += [(stage, index) for stage in stages for index in range(first, first + size)]
        first += size
    return order


def _one_forward_one_backward(forwards: Order, backwards: Order, num_warm_up: int) -> tuple[Action, ...]:
    """Returns `num_warm_up` forwards, then a forward and a backward in turn, then the remaining backwards."""
    num_warm_up = min(num_warm_up, len(forwards))
    actions = [Action(Kind.FORWARD, *each) for each in forwards[:num_warm_up]]
    num_pairs = len(forwards) - num_warm_up
    for forward, backward in zip(forwards[num_warm_up:], backwards[:num_pairs], strict=True):
        actions += [Action(Kind.FORWARD, *forward), Action(Kind.BACKWARD, *backward)]
    actions += [Action(Kind.BACKWARD, *each) for each in backwards[num_pairs:]]
    return tuple(actions)


_GENERATORS: dict[str, Callable[[int, int, int, int], tuple[Action, ...]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "forward-only": _forward_only,
}
