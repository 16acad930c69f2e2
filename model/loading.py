"""The load of a rank's parameters from a checkpoint of any layout."""

from collections.abc import Callable

from ..checkpoint.read.read_plan import ReadRequest
from ..checkpoint.read.reader import Checkpoint
from ..checkpoint.read.shared_read import ALONE, Peers, read_all
from ..checkpoint.read.stored_array import StoredArray
from ..parallel.torch_dtypes import format_of
from .decoder import Decoder
from .stored_tensors import check_tensors, check_ties


def load_weights(
    decoder: Decoder,
    checkpoint: Checkpoint,
    on_bytes: Callable[[int], None] = lambda _: None,
    peers: Peers = ALONE,
) -> None:
    """Copies this rank's boxes of every weight into the decoder, cast to its dtype; padding becomes zero.

    An alias is read from its original. A decoder in fp32 takes the fp32 masters if the checkpoint has them.

    Args:
        decoder: the decoder to fill.
        checkpoint: the checkpoint to read.
        on_bytes: a function that is called with the number of bytes of each box after its read.
        peers: the ranks of this host that load at the same time; together they read each block once.

    Raises:
        ShapeMismatch: the checkpoint's tensors are not this model's.
        ShardCorrupt: stored bytes do not match their checksum.
    """
    locals_ = decoder.local_params()
    check_tensors([piece.tensor for local in locals_ for piece in local.pieces], checkpoint)
    check_ties(decoder.spec.table, checkpoint)
    requests, places = [], []
    for local in locals_:
        flat = decoder.get_parameter(local.name).data.view(-1).zero_()
        for piece in local.pieces:
            requests.append(
                ReadRequest(piece.tensor.alias or piece.tensor.name, piece.box, dtype=format_of(flat.dtype))
            )
            places.append(flat[piece.start : piece.start + piece.box.size])

    def deliver(index: int, values: StoredArray) -> None:
        places[index].copy_(values.torch().reshape(-1))
        on_bytes(values.values.nbytes)

    read_all(checkpoint, requests, deliver, peers)
