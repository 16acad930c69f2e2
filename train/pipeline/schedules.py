"""The schedules: pure functions from (pp, virtual stages, micro-batches) to every rank's actions.

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
    """The schedule `name` (one of NAMES, or "forward-only") for any number of micro-batches.

    Raises:
        ParallelError: the combination does not exist; says which formula it breaks and what would fit.
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
            f"virtual_stages = {virtual_stages} with pp = 1: virtual stages are dealt over 2 or more pipeline ranks. "
            "Use virtual_stages = 1 or a larger pp."
        )
    if virtual_stages > 1 and name in ("1f1b", "zb-h1"):
        raise ParallelError(
            f"schedule = {name!r} has one stage per rank, and virtual_stages = {virtual_stages}. "
            "Use virtual_stages = 1, or schedule = 'interleaved'."
        )
    if virtual_stages == 1 and name == "interleaved":
        raise ParallelError(
            "schedule = 'interleaved' needs virtual_stages >= 2, and virtual_stages = 1. "
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
    """1f1b whose weight gradients come `rank` micro-batches late: then every rank has pp micro-batches in flight, as
    1f1b's first rank has, and the late ones fill the bubble at its end."""
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
    """Micro-batches that go through one model chunk before the next one's turn: pp, or a little more where pp does
    not divide them; fewer than pp would leave ranks waiting in every group."""
    num_groups = max(1, num_micro_batches // pp)
    small, num_larger = divmod(num_micro_batches, num_groups)
    return [small + (index < num_larger) for index in range(num_groups)]


def _by_groups(stages: range, sizes: list[int]) -> Order:
    order: Order = []
    first = 0
    for size in sizes:
        order += [(stage, index) for stage in stages for index in range(first, first + size)]
        first += size
    return order


def _one_forward_one_backward(forwards: Order, backwards: Order, num_warm_up: int) -> tuple[Action, ...]:
    """`num_warm_up` forwards, then a forward and a backward by turns, then the backwards that are left."""
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
