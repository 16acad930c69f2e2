"""The table of a model's tensors: each one's declaration by its architecture, and how tensor parallelism cuts it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .dtypes import by_code
from .errors import ParallelError
from .geometry import Box
from .integers import ceil_div


@dataclass(frozen=True, slots=True)
class Split:
    """How tensor parallelism cuts a tensor along `dim`.

    Attributes:
        dim: the dimension that is cut.
        unit: the number of elements along `dim` that stay together (head_dim for q, k and v).
        rule: "exact": tp divides the number of units; "pad": the last ranks may hold fewer units, and pad to equal
            shapes; "replicate": as "exact", but if tp exceeds the units, tp / units neighbouring ranks hold each.
        of: the config key with the number of units, for messages.
        sections: the number of equal sections of `dim` that are cut separately (GPT-2's columns of q, k and v): at
            tp > 1, a rank holds one box of each.
    """

    dim: int
    unit: int = 1
    rule: Literal["exact", "pad", "replicate"] = "exact"
    of: str = ""
    sections: int = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor, with the name and orientation of the architecture's Hugging Face files.

    Attributes:
        name: the tensor's name in the files.
        shape: the shape of the whole tensor.
        split: how tensor parallelism cuts the tensor; None = every tensor-parallel rank holds all of it.
        layer: the index of its decoder layer, or the pipeline stage, "first" or "last", of a tensor outside of them.
        param: the name of the module parameter that fuses this and other tensors as stacked rows; "" = `name`.
        alias: the name of the tensor whose values it shares (tied embeddings); an alias is never stored.
        init: how training fills the tensor before step 0: "normal" noise, "ones", "zeros", or "uniform" noise within
            1 / sqrt(the number of columns) of 0.
        partial_grad: whether every tensor-parallel rank holds the whole tensor but computes only a part of its gradient
            (norms of heads, routers, one factor of an adapter); the gradient is then summed over tp.
        trainable: whether an optimizer updates the tensor; a frozen one has no slot but "weight".
        dtype: the safetensors code of its weight; "" = the model's (only a module's integer buffers have their own),
            until `with_slots` says which.
        states: the slots that an optimizer keeps of it beside the weight, with their safetensors codes; none until
            `with_slots` decides them.
        expert: the number of the expert of its layer that it is a part of; None = every token uses it.
        buffer: whether it is a buffer of its module, which a pass may change; it is not trainable.
        stored: whether a checkpoint has it; the base of an adapter is stored elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    layer: int | Literal["first", "last"] = "first"
    param: str = ""
    alias: str = ""
    init: Literal["normal", "ones", "zeros", "uniform"] = "normal"
    partial_grad: bool = False
    trainable: bool = True
    dtype: str = ""
    states: Mapping[str, str] = field(default_factory=dict, hash=False)
    expert: int | None = None
    buffer: bool = False
    stored: bool = True

    @property
    def sharded(self) -> bool:
        """Whether data ranks hold a part of its weight each at ZeRO stage 3.

        They hold frozen parameters as they hold trained ones; buffers, and parameters of integers, are on every rank.
        """
        return self.trainable or not (self.buffer or (self.dtype and by_code(self.dtype).is_integer))

    @property
    def slots(self) -> dict[str, str]:
        """The slots that a checkpoint stores of the tensor, with their safetensors codes: "weight" first."""
        return {"weight": self.dtype, **self.states}


Table = Sequence[TensorSpec]


def with_slots(table: Table, slots: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """Returns the tensors with their slots: trainable ones with all that are given, frozen ones with "weight" alone.

    Args:
        table: the tensors.
        slots: the dtype code of each slot; a weight with a dtype of its own keeps it.
    """
    states = {slot: code for slot, code in slots.items() if slot != "weight"}
    return tuple(
        replace(spec, dtype=spec.dtype or slots["weight"], states=states if spec.trainable else {}) for spec in table
    )


def num_layers(table: Table) -> int:
    """Returns the number of decoder layers in a table."""
    layers = {spec.layer for spec in table}
    return max((layer + 1 for layer in layers if isinstance(layer, int)), default=0)


def num_experts(table: Table) -> int:
    """Returns the number of experts of a layer; 0 without a mixture of experts."""
    experts = {spec.expert for spec in table}
    return max((expert + 1 for expert in experts if expert is not None), default=0)


def split_boxes(spec: TensorSpec, tp: int, rank: int) -> tuple[Box, ...]:
    """Returns the boxes of `spec` that tensor-parallel rank `rank` of `tp` holds: one, or one of each section.

    Raises:
        ParallelError: tp does not fit the tensor.
    """
    split = spec.split
    if split is None or (split.sections > 1 and tp == 1):
        return (Box.whole(spec.shape),)
    extent = spec.shape[split.dim] // split.sections
    low, high = _cut_units(spec, split, extent // split.unit, tp, rank)
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    shape[split.dim] = (high - low) * split.unit
    boxes = []
    for section in range(split.sections):
        offset[split.dim] = section * extent + low * split.unit
        boxes.append(Box(tuple(offset), tuple(shape)))
    return tuple(boxes)


def _cut_units(spec: TensorSpec, split: Split, units: int, tp: int, rank: int) -> tuple[int, int]:
    if split.rule == "pad":
        per_rank = ceil_div(units, tp)
        return min(rank * per_rank, units), min((rank + 1) * per_rank, units)
    if split.rule == "replicate" and units < tp and tp % units == 0:
        return rank * units // tp, rank * units // tp + 1
    if units % tp == 0:
        return rank * units // tp, (rank + 1) * units // tp
    raise ParallelError(_indivisible(spec, split, units, tp))


def _indivisible(spec: TensorSpec, split: Split, units: int, tp: int) -> str:
    fits = [n for n in range(1, units + 1) if units % n == 0]
    more = ", ..." if len(fits) > 8 else f", or a multiple of {units}" if split.rule == "replicate" else ""
    return (
        f"tp = {tp} does not fit {spec.name}: {split.of or 'its units'} % tp = {units} % {tp} = {units % tp}, and it "
        f"must be 0. This tensor fits tp = {' or '.join(map(str, fits[:8]))}{more}."
    )


def num_holders(spec: TensorSpec, tp: int) -> int:
    """Returns how many neighbouring tensor-parallel ranks hold the same part of a split tensor.

    The result is 1 for a tensor that is not split.
    """
    if spec.split is None or spec.split.rule != "replicate":
        return 1
    return max(1, tp * spec.split.unit * spec.split.sections // spec.shape[spec.split.dim])


def is_owner(spec: TensorSpec, tp: int, rank: int) -> bool:
    """Returns whether tensor-parallel rank `rank` is the lowest with its part of the tensor; False for an alias."""
    if spec.alias:
        return False
    return rank == 0 if spec.split is None else rank % num_holders(spec, tp) == 0
