"""The messages of a rank in one optimizer step, by mesh axis and collective (no torch).

Bytes on the wire are those of ring algorithms: an all-reduce of n bytes over N ranks moves 2 n (N - 1) / N per rank, a
reduce-scatter or an all-gather half of that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ...core.dtypes import FP32
from ...core.layout import Layout

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The calls of one collective for one purpose.

    Attributes:
        axis: the mesh axis.
        what: the tensors that are sent.
        ranks: the number of ranks that take part.
        calls: the number of calls per optimizer step.
        message_bytes: the size of the tensor of one call, the parts of all ranks together.
    """

    axis: str
    collective: Collective
    what: str
    ranks: int
    calls: int
    message_bytes: int

    @property
    def wire_bytes(self) -> int:
        """The bytes that each rank sends per optimizer step."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "send": 1.0}.get(self.collective, share)
        return round(self.calls * self.message_bytes * factor)


@dataclass(frozen=True, slots=True)
class FamilyWork:
    """The numbers of elements of one family that a rank exchanges.

    Attributes:
        num_params: the number of elements of this rank's buckets of trained parameters.
        num_gathered_twice: the number of elements that ZeRO stage 3 also gathers for backward, frozen ones too.
        num_frozen: the number of frozen elements that ZeRO stage 3 gathers.
    """

    num_params: int
    num_gathered_twice: int
    num_frozen: int = 0

    @property
    def num_gathered(self) -> int:
        """The number of elements that ZeRO stage 3 gathers for forward."""
        return self.num_params + self.num_frozen


@dataclass(frozen=True, slots=True)
class StepWork:
    """The numbers of a rank's optimizer step that communication depends on.

    Attributes:
        families: the elements of each family, by its name.
        itemsize: bytes of a parameter.
        hidden_bytes: the size of one micro-batch's hidden states, not split.
        num_layers: the number of layers on this rank.
        num_micro_batches: the number of micro-batches of this rank.
        sequence_parallel: whether hidden states are split over tp along the sequence.
        recompute_full: whether backward runs the forward of every layer again.
        num_exchanged: the number of blocks without a part that is split over tp: experts on different ranks.
    """

    families: Mapping[str, FamilyWork]
    itemsize: int
    hidden_bytes: int
    num_layers: int
    num_micro_batches: int
    sequence_parallel: bool
    recompute_full: bool
    num_exchanged: int = 0


def traffic(layout: Layout, work: StepWork) -> list[Traffic]:
    """Returns all communication that grows with the model or the batch; none for a single rank."""
    data = [each for name, family in work.families.items() for each in _data_parallel(layout, work, name, family)]
    return [*_tensor_parallel(layout, work), *_pipeline(layout, work), *data]


def _tensor_parallel(layout: Layout, work: StepWork) -> Iterator[Traffic]:
    if layout.tp == 1:
        return
    blocks = (2 * work.num_layers - work.num_exchanged) * work.num_micro_batches
    passes = 3 if work.recompute_full else 2
    if not work.sequence_parallel:
        yield Traffic("tp", "all_reduce", "hidden states", layout.tp, passes * blocks, work.hidden_bytes)
        return
    # At the input of each block: a gather in forward and another one in backward for the weight's gradient, and a
    # scatter of the input's gradient. At its output: a scatter, and a gather of the output's gradient.
    yield Traffic("tp", "all_gather", "hidden states", layout.tp, (passes + 1) * blocks, work.hidden_bytes)
    yield Traffic("tp", "reduce_scatter", "hidden states", layout.tp, passes * blocks, work.hidden_bytes)


def _pipeline(layout: Layout, work: StepWork) -> Iterator[Traffic]:
    if layout.pp > 1:
        calls = 2 * layout.virtual_stages * work.num_micro_batches
        size = work.hidden_bytes // (layout.tp if work.sequence_parallel else 1)
        yield Traffic("pp", "send", "hidden states and their gradients", layout.pp, calls, size)


def _data_parallel(layout: Layout, work: StepWork, name: str, family: FamilyWork) -> Iterator[Traffic]:
    """Yields the traffic of the ranks that hold the same tensors of a family."""
    spread = layout.families[name]
    axis = "edp" if name == "experts" else "dp" if layout.cp == 1 else "dp x cp"
    group, copies = spread.group_size, spread.num_copies
    grads, params = family.num_params * FP32.itemsize, family.num_params * work.itemsize
    if group > 1:
        calls = work.num_micro_batches if layout.zero >= 2 else 1
        yield Traffic(axis, "reduce_scatter", "gradients", group, calls, grads)
        if layout.zero < 3:
            yield Traffic(axis, "all_gather", "parameters", group, 1, params)
        else:
            first, again = family.num_gathered * work.itemsize, family.num_gathered_twice * work.itemsize
            yield Traffic(axis, "all_gather", "parameters, forward", group, work.num_micro_batches, first)
            yield Traffic(axis, "all_gather", "parameters, backward", group, work.num_micro_batches, again)
    if copies > 1:
        yield Traffic(axis, "all_reduce", "gradients of replicas", copies, 1, grads // group)
