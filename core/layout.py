"""The layout: how a model and its optimizer are spread over ranks, as plain data without processes.

Seven functions derive a rank's share from it, each from the one before:
    place          the numbers of a rank among those that hold the same kind of tensors  places.py
    split_boxes    the boxes of a tensor that tensor-parallel rank r holds               tensors.py
    stages         the layers of one pipeline rank                                       layout.py
    local_params   the parameters of one rank, possibly padded                           local_params.py
    buckets        those parameters laid end to end in flat buffers, as ZeRO cuts them   buckets.py
    shards         the ranges of buckets that one rank updates                           buckets.py
    owned          the ranges that one rank saves                                        ownership.py
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .errors import ParallelError
from .places import Coordinates, Spread
from .tensors import Table, TensorSpec, num_layers


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the pipeline: consecutive layers.

    Attributes:
        layers: the numbers of its layers in the whole model.
        first: whether the stage also holds the embedding.
        last: whether the stage also holds the final norm and the head.
    """

    layers: range
    first: bool = True
    last: bool = True

    @property
    def places(self) -> tuple[int | str, ...]:
        """The layers of its tensors (`TensorSpec.layer`), with "first" and "last"."""
        return (*self.layers, *(["first"] if self.first else []), *(["last"] if self.last else []))

    def holds(self, spec: TensorSpec) -> bool:
        """Returns whether this stage holds a tensor."""
        return spec.layer in self.places


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model and its optimizer are spread over ranks.

    The axes of the mesh are, from slowest to fastest, pp, dp, cp and tp. The data ranks, dp x cp of them, hold the same
    parts of tensors that every token uses; dp deals them rows, cp deals them positions of a row. Experts are held by
    the same ranks with axes of their own, edp x ep x expert_tp in each pipeline stage, so ep may exceed dp.

    Attributes:
        tp: the number of tensor-parallel ranks.
        pp: the number of pipeline-parallel ranks.
        dp: the number of data-parallel ranks.
        cp: the number of context-parallel ranks.
        ep: the number of expert-parallel ranks.
        expert_tp: the number of tensor-parallel ranks of an expert; 0 = tp at ep = 1, else 1.
        virtual_stages: the number of stages on each pipeline rank.
        shard_size: the number of ranks in a ZeRO group, a divisor of dp x cp (hybrid sharding); 0 = dp x cp.
        zero: the ZeRO stage, 0 to 3.
        bucket_size: the number of elements at which a flat bucket is full; only a larger parameter exceeds it.
        layer_buckets: whether buckets hold whole layers; then only a larger layer exceeds `bucket_size`.
        sharding: how ZeRO cuts a bucket: "flat" into equal ranges, "dim0" (FSDP's rule) by whole rows of parameters.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0
    virtual_stages: int = 1
    shard_size: int = 0
    zero: int = 0
    bucket_size: int = 2**24
    sharding: Literal["flat", "dim0"] = "flat"
    layer_buckets: bool = False

    def __post_init__(self) -> None:
        for key in ("tp", "pp", "dp", "cp", "ep", "virtual_stages", "bucket_size"):
            if getattr(self, key) < 1:
                raise ParallelError(f"{key} = {getattr(self, key)}; it must be 1 or more.")
        if self.zero not in (0, 1, 2, 3):
            raise ParallelError(f"zero stage = {self.zero}; it must be 0, 1, 2 or 3.")
        if self.shard_size < 0 or (self.shard_size and self.data % self.shard_size):
            name, value = ("dp", self.dp) if self.cp == 1 else ("dp x cp", f"{self.dp} x {self.cp} = {self.data}")
            raise ParallelError(
                f"shard_size = {self.shard_size} does not divide {name} = {value}; use a divisor of {name}, or 0 for "
                f"{name}."
            )
        usual = self.tp if self.ep == 1 else 1
        if self.expert_tp == usual:
            object.__setattr__(self, "expert_tp", 0)  # so that equal layouts are equal values
        size = self.expert_tp or usual
        if size < 0 or self.stage_size % (self.ep * size):
            raise ParallelError(
                f"ep x expert_tp = {self.ep} x {size} does not divide the dp x cp x tp = {self.dp} x {self.cp} x "
                f"{self.tp} = {self.stage_size} ranks of a pipeline stage; use an ep and an expert_tp whose product "
                "does."
            )

    @property
    def data(self) -> int:
        """The number of data ranks, which hold the same parts of tensors that every token uses."""
        return self.dp * self.cp

    @property
    def stage_size(self) -> int:
        """The number of ranks with the same pipeline stages."""
        return self.data * self.tp

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp * self.stage_size

    @property
    def group_size(self) -> int:
        """The number of data ranks that share one copy of the optimizer state (1 at ZeRO stage 0)."""
        return 1 if self.zero == 0 else self.shard_size or self.data

    @property
    def dense(self) -> Spread:
        """How ranks hold the tensors that every token uses."""
        return Spread(self.data, 1, self.tp, self.group_size)

    @property
    def experts(self) -> Spread:
        """How ranks hold the tensors of single experts.

        There are as many copies of their optimizer state as of the others', or if edp has no such divisor, the most
        that divide both. So where a ZeRO group has room for whole copies of the experts, it has their states too.
        """
        tp = self.expert_tp or (self.tp if self.ep == 1 else 1)
        data = self.stage_size // (self.ep * tp)
        group_size = 1 if self.zero == 0 else data // math.gcd(data, self.dense.num_copies)
        return Spread(data, self.ep, tp, group_size)

    @property
    def families(self) -> dict[str, Spread]:
        """How ranks hold the tensors of each family, by the family's name.

        Experts are a family only if other ranks share them than share the other tensors.
        """
        dense, experts = self.dense, self.experts
        return {"dense": dense} if experts == dense else {"dense": dense, "experts": experts}

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a global rank."""
        data = rank // self.tp % self.data
        return Coordinates(rank // self.stage_size, data // self.cp, data % self.cp, rank % self.tp)

    def rank(self, at: Coordinates) -> int:
        """Returns the global rank with these coordinates."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for a manifest, from which `Layout(**data)` is the same layout but for `layer_buckets`.

        No reader needs to know how buckets were filled, since chunks say which elements they hold. Keys that are not in
        every manifest are left out where they say nothing.
        """
        absent = {"cp": 1, "ep": 1, "expert_tp": 0, "layer_buckets": self.layer_buckets}
        return {key: value for key, value in asdict(self).items() if absent.get(key) != value}


def stages(table: Table, layout: Layout) -> tuple[tuple[Stage, ...], ...]:
    """Returns the stages of each pipeline rank.

    The layers are cut into pp x virtual_stages stages, which are assigned to the pipeline ranks in turn.

    Raises:
        ParallelError: the model has fewer layers than stages.
    """
    layers, count = num_layers(table), layout.pp * layout.virtual_stages
    if 1 < count > layers:
        raise ParallelError(
            f"pp x virtual_stages = {layout.pp} x {layout.virtual_stages} = {count} stages need at least that many "
            f"layers; num_hidden_layers = {layers}. Use fewer stages."
        )
    cuts = [index * layers // count for index in range(count + 1)]
    found = [Stage(range(cuts[index], cuts[index + 1]), index == 0, index == count - 1) for index in range(count)]
    return tuple(tuple(found[pp :: layout.pp]) for pp in range(layout.pp))
