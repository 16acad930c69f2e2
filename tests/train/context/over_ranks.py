"""Rows whose attention ranks compute together, in either mode, and the comparison with plain attention."""

from dataclasses import dataclass

import torch

from tk.parallel.mesh import Group, join_world
from tk.tests.train.context.plain_attention import plain_gradients, random_qkv
from tk.train.context.dealing import deal
from tk.train.context.gather import GatheredAttention
from tk.train.context.ulysses import UlyssesAttention


@dataclass
class Layer:
    """An attention layer with a window or without one."""

    window: int | None = None
    layer: int = 0


@dataclass(frozen=True)
class RowsOverRanks:
    """A micro-batch of attention.

    Attributes:
        heads: the numbers of query heads and kv heads.
        documents: the lengths of documents over all rows; () for rows that are one document each.
        window: the layer's window.
        row_length: the positions of a row.
        num_rows: the rows of the micro-batch.
        multiple: a divisor of the positions of a row that a rank computes.
    """

    heads: tuple[int, int] = (4, 4)
    documents: tuple[int, ...] = ()
    window: int | None = None
    row_length: int = 96
    num_rows: int = 1
    multiple: int = 1


PACKED = (5, 60, 1, 30, 90, 6)  # two rows of 96
CASES = {
    "one document": RowsOverRanks(),
    "grouped heads, fewer kv heads than ranks": RowsOverRanks(heads=(8, 1)),
    "kv heads that are no multiple of the ranks": RowsOverRanks(heads=(12, 3)),
    "packed documents": RowsOverRanks((8, 2), PACKED, num_rows=2),
    "a window": RowsOverRanks((4, 2), window=20, num_rows=2),
    "a window within packed documents": RowsOverRanks((4, 2), PACKED, 20, num_rows=2),
    "an odd row length": RowsOverRanks((4, 2), (40, 57, 97), None, 97, 2),
    "a row shorter than the ranks' blocks, padded to a multiple": RowsOverRanks((4, 2), (), 3, 7, 2, multiple=3),
    "documents of one token": RowsOverRanks((4, 4), (1,) * 30 + (66,)),
}


def distances(group: Group, case: RowsOverRanks, mode: str, dtype: torch.dtype) -> list[float]:
    """Returns how far this rank's output is from plain attention over whole rows, and how far each gradient is.

    The differences of gradients are divided by the norm of all three, since one alone may be nearly 0.
    """
    dealing = deal(case.num_rows, case.row_length, case.documents, [case.window], group.size, case.multiple)
    qkvg = random_qkv(dealing.num_positions, case.heads, dtype)
    mine = torch.from_numpy(dealing.positions(group.rank))
    expected = plain_gradients(tuple(qkvg[:3]), qkvg[3], dealing, case.window)
    plain, *gradients = (each[mine].double() for each in expected)
    q, k, v, grad = (each[mine] for each in qkvg)
    attend = GatheredAttention if mode == "gather" else UlyssesAttention
    out = attend(dealing, group)(Layer(case.window), q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    found = torch.autograd.grad(out, (q, k, v), grad)
    whole = torch.cat([each.flatten() for each in gradients]).norm()
    apart = [(one - other).norm() / whole for one, other in zip(found, gradients, strict=True)]
    return [float(each) for each in ((out.detach() - plain).norm() / plain.norm(), *apart)]


def compare_modes(dtype: str, bound: float) -> None:
    """Compares both modes with plain attention, over the group's link and over gloo alone."""
    linked = join_world()
    alone = Group(linked.process_group, linked.rank, linked.size)
    for name, case in CASES.items():
        for mode in ("gather", "ulysses"):
            if mode == "ulysses" and case.heads[0] % linked.size:
                continue
            for group in (linked, alone):
                found = distances(group, case, mode, getattr(torch, dtype))
                assert max(found) <= bound, f"{name}, {mode}: {found}"
