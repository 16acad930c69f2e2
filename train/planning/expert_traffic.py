"""The messages of experts on different ranks in one optimizer step of a rank, if all get as many tokens (no torch).

A pair is a token and one of its experts. A layer sends each pair to its expert and the output back, and backward the
gradients of both; it sends pairs and outputs once more if it runs the layer's forward again.
"""

from collections.abc import Iterator, Sequence

from ...model.spec import ExpertsSpec
from .activation_memory import PassShape
from .traffic import Traffic


def expert_traffic(shape: PassShape, blocks: Sequence[ExpertsSpec], num_micro_batches: int) -> Iterator[Traffic]:
    """Yields what a rank exchanges; nothing if experts are split over tp as other layers are.

    Args:
        shape: the sizes of a forward pass.
        blocks: the rank's blocks of experts.
        num_micro_batches: the number of micro-batches of the rank.
    """
    experts, hidden = shape.experts, shape.spec.hidden_size * shape.itemsize
    if experts is None:
        return
    forwards = 2 if shape.recompute == "full" else 1
    for top_k in sorted({block.top_k for block in blocks}):
        count = sum(block.top_k == top_k for block in blocks) * num_micro_batches
        if experts.ep > 1:
            size = shape.routed_tokens * top_k * hidden
            yield Traffic("ep", "all_to_all", "tokens of experts", experts.ep, (2 * forwards + 2) * count, size)
    count = len(blocks) * num_micro_batches * (forwards + 1)
    if count and experts.tp > 1:  # the ranks of an expert compute a part of it for the tokens of all of them
        for collective in ("all_gather", "reduce_scatter"):
            size = shape.routed_tokens * hidden
            yield Traffic("expert_tp", collective, "tokens of experts", experts.tp, count, size)
    if count and shape.tp > 1 and not shape.sequence_parallel:  # which hold the same tokens, and deal them
        yield Traffic("tp", "all_gather", "outputs of experts", shape.tp, count, shape.tokens * hidden)
