"""From a checkpoint of any layout into a rank's parameters."""

from collections.abc import Callable
from types import MappingProxyType

import torch

from ..checkpoint.reader import Checkpoint
from ..core.dtypes import BF16, FP16, FP32
from ..core.errors import ShapeMismatch
from ..core.layout import TensorSpec
from .decoder import Decoder

_DTYPES = MappingProxyType({torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16})


def load_weights(decoder: Decoder, checkpoint: Checkpoint, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Copies this rank's boxes of every weight into the decoder, casting to its dtype; padding becomes zero. An alias
    is read from its original.

    A target in fp32 takes the fp32 masters where the checkpoint has them.

    Args:
        on_bytes: told the bytes of each tensor as it has been read.

    Raises:
        ShapeMismatch: the checkpoint's tensors are not this model's.
        ShardCorrupt: stored bytes do not match their checksum.
    """
    locals_ = decoder.local_params()
    check_tensors([piece.tensor for local in locals_ for piece in local.pieces], checkpoint)
    with torch.no_grad():
        for local in locals_:
            parameter = decoder.get_parameter(local.name)
            flat = parameter.view(-1).zero_()
            for piece in local.pieces:
                name = piece.tensor.alias or piece.tensor.name
                values = checkpoint.read(name, piece.box, dtype=_DTYPES[parameter.dtype]).torch()
                flat[piece.start : piece.start + piece.box.size].copy_(values.reshape(-1))
                on_bytes(values.nbytes)


def check_tensors(specs: list[TensorSpec], checkpoint: Checkpoint) -> None:
    """Raises ShapeMismatch naming the first tensor that the checkpoint lacks or has in another shape."""
    for spec in specs:
        name = spec.alias or spec.name
        found = checkpoint.tensors.get(name)
        if found is None:
            raise ShapeMismatch(f"{checkpoint.path} has no tensor {name}, which its config.json calls for.")
        if tuple(found.shape) != spec.shape:
            raise ShapeMismatch(
                f"{checkpoint.path}: {name} has shape {list(found.shape)}; its config.json calls for "
                f"{list(spec.shape)}."
            )
