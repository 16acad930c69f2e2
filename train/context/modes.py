"""The two modes of context-parallel attention, and the choice between them by the bytes that they move (no torch)."""

from dataclasses import dataclass
from math import lcm
from typing import Final, Literal, get_args

from ...core.errors import ParallelError

Mode = Literal["gather", "ulysses"]
Recompute = Literal["none", "selective", "full"]
_CALLS: Final[dict[Recompute, int]] = {"none": 1, "selective": 2, "full": 2}  # of attention, before its backward


@dataclass(frozen=True, slots=True)
class AttentionExchange:
    """The all-to-alls of one purpose in one layer, for one micro-batch forward and backward.

    Attributes:
        what: the tensors that are sent.
        calls: how often they are.
        vectors: the vectors of one head for each position of a rank, in the tensor of which each rank sends or receives
            all parts but its own; a fraction of them if it needs less of each.
    """

    what: str
    calls: int
    vectors: float


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of a tensor-parallel rank, and the context-parallel ranks that compute attention with them.

    Attributes:
        queries: the number of query heads.
        keys: the number of kv heads.
        cp: the number of context-parallel ranks.
    """

    queries: int
    keys: int
    cp: int

    @classmethod
    def of_rank(cls, queries: int, keys: int, tp: int, cp: int) -> "AttentionHeads":
        """Returns the heads of one of tp ranks of a model; it has at least one kv head."""
        return cls(queries // tp, max(1, keys // tp), cp)

    @property
    def repeated_keys(self) -> int:
        """The number of kv heads that Ulysses sends: repeated so that each rank has those of its query heads."""
        return lcm(self.keys, self.cp)

    @property
    def ulysses_problem(self) -> str | None:
        """The reason why Ulysses cannot split the query heads; None if it can."""
        if self.queries % self.cp == 0:
            return None
        return (
            f'cp_mode = "ulysses" gives each of the cp ranks equally many query heads, but heads % cp = '
            f"{self.queries} % {self.cp} = {self.queries % self.cp} (heads of one tp rank)."
        )


def exchanges(
    mode: Mode, heads: AttentionHeads, recompute: Recompute, fetched: float = 1.0
) -> tuple[AttentionExchange, ...]:
    """Returns what attention exchanges in one layer.

    Args:
        mode: "gather" fetches the keys and values of other positions, in backward once more, and returns gradients.
            "ulysses" sends queries, keys and values of the heads of other ranks, gets outputs of its own positions,
            and in backward sends both gradients.
        heads: the heads of a rank.
        recompute: what backward computes again; "selective" needs no outputs again.
        fetched: the share of other ranks' keys that "gather" fetches.
    """
    calls = _CALLS[recompute]
    if mode == "gather":
        keys = 2 * heads.keys * heads.cp * fetched
        return AttentionExchange("keys and values", calls + 1, keys), AttentionExchange(
            "gradients of keys and values", 1, keys
        )
    inputs, outputs = "queries, keys, values, and their gradients", "outputs of attention, and their gradients"
    return (
        AttentionExchange(inputs, calls + 1, heads.queries + 2 * heads.repeated_keys),
        AttentionExchange(outputs, (2 if recompute == "full" else 1) + 1, heads.queries),
    )


def choose_mode(
    wanted: Mode | Literal["auto"], heads: AttentionHeads, recompute: Recompute, fetched: float = 1.0
) -> Mode:
    """Returns the mode of a run: the wanted one, or for "auto" the one that moves fewer bytes, "gather" if both do.

    Args:
        wanted: [parallel] cp_mode.
        heads: the heads of a rank.
        recompute: what backward computes again.
        fetched: see `exchanges`, as a mean over the layers of the model.

    Raises:
        ParallelError: Ulysses is wanted, but cannot split the heads.
    """
    problem = heads.ulysses_problem
    if wanted == "auto":
        modes: tuple[Mode, ...] = get_args(Mode)
        moved = {
            mode: sum(each.calls * each.vectors for each in exchanges(mode, heads, recompute, fetched))
            for mode in modes
        }
        return "ulysses" if problem is None and moved["ulysses"] < moved["gather"] else "gather"
    if wanted == "ulysses" and problem is not None:
        raise ParallelError(f'{problem} Use cp_mode = "gather" or "auto", or a cp that divides the heads.')
    return wanted
