"""The layout: how a model and its optimizer are spread over ranks, as plain data without processes.

Six functions derive a rank's share from it, each from the one before:
    split_boxes    the boxes of a tensor that tensor-parallel rank r holds               tensors.py
    stages         the layers of one pipeline rank                                       layout.py
    local_params   the parameters of one (pp, tp) position, possibly padded              local_params.py
    buckets        those parameters laid end to end in flat buffers, as ZeRO cuts them   buckets.py
    shards         the ranges of a bucket that one data-parallel rank updates            buckets.py
    owned          the ranges that one rank saves                                        ownership.py
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from .errors import ParallelError
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

    def holds(self, spec: TensorSpec) -> bool:
        """Returns whether this stage holds a tensor."""
        if isinstance(spec.layer, int):
            return spec.layer in self.layers
        return self.first if spec.layer == "first" else self.last


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's coordinates in the mesh: its number along each axis."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model and its optimizer are spread over ranks.

    The axes of the mesh are, from slowest to fastest, pp, dp (replicate, then shard) and tp.

    Attributes:
        tp: the number of tensor-parallel ranks.
        pp: the number of pipeline-parallel ranks.
        dp: the number of data-parallel ranks.
        virtual_stages: the number of stages on each pipeline rank.
        shard_size: the number of ranks in a ZeRO group, a divisor of dp (hybrid sharding); 0 = dp.
        zero: the ZeRO stage, 0 to 3.
        bucket_size: the number of elements at which a flat bucket is full; only a larger parameter exceeds it.
        sharding: how ZeRO cuts a bucket: "flat" into equal ranges, "dim0" (FSDP's rule) by whole rows of parameters.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_stages: int = 1
    shard_size: int = 0
    zero: int = 0
    bucket_size: int = 2**24
    sharding: Literal["flat", "dim0"] = "flat"

    def __post_init__(self) -> None:
        for key in ("tp", "pp", "dp", "virtual_stages", "bucket_size"):
            if getattr(self, key) < 1:
                raise ParallelError(f"{key} = {getattr(self, key)}; it must be 1 or more.")
        if self.zero not in (0, 1, 2, 3):
            raise ParallelError(f"zero stage = {self.zero}; it must be 0, 1, 2 or 3.")
        if self.shard_size < 0 or (self.shard_size and self.dp % self.shard_size):
            raise ParallelError(
                f"shard_size = {self.shard_size} does not divide dp = {self.dp}; use a divisor of dp, or 0 for dp."
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def group_size(self) -> int:
        """The number of ranks that share one copy of the optimizer state (1 at ZeRO stage 0)."""
        return 1 if self.zero == 0 else self.shard_size or self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a global rank."""
        return Coordinates(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for a manifest; `Layout(**data)` is the inverse."""
        return asdict(self)


def stages(table: Table, layout: Layout, pp: int) -> tuple[Stage, ...]:
    """Returns the stages of pipeline rank `pp`.

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
    return tuple(
        Stage(range(cuts[index], cuts[index + 1]), index == 0, index == count - 1)
        for index in range(pp, count, layout.pp)
    )
