"""What several ranks hold the same values of: the ground on which replicas are compared."""

from collections import Counter
from collections.abc import Sequence

from .buckets import buckets, shards
from .layout import Layout
from .local_params import Piece, local_params
from .ownership import Owned
from .tensors import Table


def replicated(table: Table, layout: Layout, slots: Sequence[str]) -> tuple[Owned, ...]:
    """Every run of a slot that two or more ranks hold, in an order that is the same on all of them.

    Weights are held by all of dp (below ZeRO stage 3), other slots by the replicas of an optimizer shard; either also
    by tensor-parallel ranks that share a tensor, and by both ends of a pipeline where embeddings are tied.
    """
    holders: Counter[Owned] = Counter()
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            params = local_params(table, layout, pp, tp)
            pieces = [piece for param in params for piece in param.pieces]
            parts = buckets(params, layout)
            for member in range(layout.group_size):
                copies = layout.dp // layout.group_size
                runs = [(shard.piece, shard.flat) for shard in shards(parts, layout.group_size, member)]
                for slot in slots:
                    whole = pieces if layout.zero < 3 else [p for p in pieces if not p.tensor.trainable]
                    if slot == "weight":
                        holders.update({weight_held(piece): copies for piece in whole})
                    if slot != "weight" or layout.zero == 3:
                        holders.update({run_held(slot, piece, flat): copies for piece, flat in runs})
    return tuple(item for item, count in holders.items() if count > 1)


def weight_held(piece: Piece) -> Owned:
    """The key of a weight that is held whole; a tied one has that of its original."""
    return Owned(piece.tensor.alias or piece.tensor.name, "weight", piece.box)


def run_held(slot: str, piece: Piece, flat: tuple[int, int]) -> Owned:
    """The key of a range of a slot."""
    return Owned(piece.tensor.alias or piece.tensor.name, slot, piece.box, flat)
