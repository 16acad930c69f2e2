"""The messages of context parallelism in one optimizer step of a rank, in either mode (no torch)."""

from dataclasses import replace
from typing import get_args

from ..context.modes import Mode, exchanges
from .activation_memory import PassShape
from .traffic import Traffic


def context_traffic(shape: PassShape, num_layers: int, num_micro_batches: int, fetched: float) -> list[Traffic]:
    """Returns what a rank exchanges for attention; nothing if it is the only one.

    A call is here all of a layer's, of which "gather" has one for each group of heads.

    Args:
        shape: the sizes of a forward pass, with the mode.
        num_layers: the number of layers on the rank.
        num_micro_batches: the number of micro-batches of the rank.
        fetched: the share of other ranks' keys that "gather" fetches, of these layers (`context_plan.py`).
    """
    if shape.heads.cp == 1:
        return []
    vector = shape.tokens * shape.spec.head_dim * shape.itemsize
    return [
        Traffic(
            "cp",
            "all_to_all",
            each.what,
            shape.heads.cp,
            each.calls * num_layers * num_micro_batches,
            round(each.vectors * vector),
        )
        for each in exchanges(shape.cp_mode, shape.heads, shape.recompute, fetched)
    ]


def bytes_by_mode(shape: PassShape, num_layers: int, num_micro_batches: int, fetched: float) -> dict[Mode, int]:
    """Returns the bytes that a rank sends per step in each mode that is possible; for arguments see `context_traffic`.

    None are possible without context parallelism.
    """
    modes: tuple[Mode, ...] = get_args(Mode) if shape.heads.cp > 1 else ()
    return {
        mode: sum(
            each.wire_bytes
            for each in context_traffic(replace(shape, cp_mode=mode), num_layers, num_micro_batches, fetched)
        )
        for mode in modes
        if mode == "gather" or shape.heads.ulysses_problem is None
    }
