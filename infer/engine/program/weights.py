"""The load of a program's parameters from a checkpoint of any layout, as numpy arrays, without torch."""

from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np

from ....checkpoint.read.read_plan import ReadRequest
from ....checkpoint.read.reader import Checkpoint
from ....checkpoint.read.shared_read import ALONE, Peers, read_all
from ....checkpoint.read.stored_array import StoredArray
from ....core.casts import Array
from ....core.dtypes import FP32, DType
from ....core.local_params import LocalParam
from ....core.tensors import Table
from ....model.stored_tensors import check_tensors, check_ties

TakeParam: TypeAlias = Callable[[LocalParam, Array], object]
# `load_params` with its first arguments set: it receives `take`, `peers` and `threads`.
LoadParams: TypeAlias = Callable[[TakeParam, Peers, int], None]


def load_params(
    params: Sequence[LocalParam],
    table: Table,
    checkpoint: Checkpoint,
    dtype: DType,
    take: TakeParam,
    peers: Peers = ALONE,
    threads: int = 1,
    wide: Collection[str] = (),
) -> None:
    """Reads every parameter of a rank, cast to a dtype; padding is zero.

    A parameter is handed over as soon as its last piece is read, and not kept. So if `take` packs it, memory holds
    little more than one copy of the weights. An alias is read from its original. For fp32, the masters are read if the
    checkpoint has them.

    Args:
        params: the rank's parameters.
        table: the tensors of the whole model.
        checkpoint: the checkpoint to read.
        dtype: the dtype of the arrays; bf16 arrives as bit patterns in uint16.
        take: a function that is called once with each parameter and its array, which it may keep, in any order.
        peers: the ranks of this host that load at the same time; together they read each block once.
        threads: the number of threads that read and call `take` at the same time, if this rank reads alone.
        wide: the names of parameters that are read in fp32, whatever the dtype is.

    Raises:
        ShapeMismatch: the checkpoint's tensors are not this model's.
        ShardCorrupt: stored bytes do not match their checksum.
    """
    places = [(param, piece) for param in params for piece in param.pieces]
    check_tensors([piece.tensor for _, piece in places], checkpoint)
    check_ties(table, checkpoint)
    dtypes = [FP32 if param.name in wide else dtype for param, _ in places]
    requests = [
        ReadRequest(piece.tensor.alias or piece.tensor.name, piece.box, dtype=kind)
        for (_, piece), kind in zip(places, dtypes, strict=True)
    ]
    unfinished: dict[str, _Unfinished] = {}
    lock = Lock()  # guards `unfinished` and the numbers in it

    def deliver(index: int, values: StoredArray) -> None:
        param, piece = places[index]
        if param.size == piece.box.size:
            take(param, values.numpy().reshape(param.shape))
            return
        with lock:
            if param.name not in unfinished:
                unfinished[param.name] = _Unfinished(param, dtypes[index])
            part = unfinished[param.name]
        part.values[piece.start : piece.start + piece.box.size] = values.numpy().reshape(-1)
        with lock:
            part.num_left -= 1
            is_complete = not part.num_left
            if is_complete:
                del unfinished[param.name]
        if is_complete:
            take(param, part.values.reshape(param.shape))

    read_all(checkpoint, requests, deliver, peers, threads)


class _Unfinished:
    """A parameter of several pieces, or with padding, of which `num_left` are not copied."""

    def __init__(self, param: LocalParam, dtype: DType) -> None:
        self.values = np.zeros(param.size, dtype.numpy)
        self.num_left = len(param.pieces)
