"""The load of the linear layers of a base that training keeps in codes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...checkpoint.read.read_plan import ReadRequest
from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import Peers, read_all
from ...checkpoint.read.stored_array import StoredArray
from ...core.casts import Array
from ...core.dtypes import FP32
from ...core.local_params import LocalParam
from ...core.quantization import Grouping, untransposed
from ...model.decoder import Decoder
from ...model.init import initial_values
from ...model.lora.coded import coded_groupings
from ...parallel.coded_weight import CodedWeight
from ...parallel.layers import ColumnParallelLinear, RowParallelLinear

Layer = ColumnParallelLinear | RowParallelLinear


@dataclass(slots=True)
class _CodedLayer:
    """A layer whose weight is read in pieces and then quantized.

    Attributes:
        local: the parameter.
        grouping: the groups of its columns.
        layer: the module.
        num_left: the number of pieces that are not read.
        values: fp32, those that are read; None before the first piece and after the last.
    """

    local: LocalParam
    grouping: Grouping
    layer: Layer
    num_left: int
    values: Array | None = None

    def take(self, start: int, values: Array, dtype: torch.dtype, device: torch.device) -> None:
        """Takes a piece; the last one makes the codes, on a device and with a dtype of widened values."""
        if self.values is None:
            self.values = np.empty(self.local.size, FP32.numpy)
        self.values[start : start + values.size] = values.reshape(-1)
        self.num_left -= 1
        if self.num_left:
            return
        rows = untransposed(self.values.reshape(self.local.shape), self.layer.product.num_transposed)
        self.layer.codes = CodedWeight.of(rows, self.grouping, dtype, device)
        self.values = None


def load_codes(
    decoders: Sequence[Decoder], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, readers: Peers
) -> None:
    """Reads the weights that are kept in codes, and quantizes each one as soon as it is read.

    Args:
        decoders: the rank's stages.
        checkpoint: the checkpoint of the base.
        dtype: the dtype of widened values.
        device: the device of the codes.
        readers: the ranks of this host, which share their reads.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    places = [(held, piece) for held in _coded_layers(decoders) for piece in held.local.pieces]
    requests = [ReadRequest(piece.tensor.name, piece.box, dtype=FP32) for _, piece in places]

    def deliver(index: int, read: StoredArray) -> None:
        held, piece = places[index]
        held.take(piece.start, read.numpy(), dtype, device)

    read_all(checkpoint, requests, deliver, readers)


def make_codes(decoders: Sequence[Decoder], seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Quantizes the initial values of the weights that are kept in codes; for the other arguments see `load_codes`."""
    for held in _coded_layers(decoders):
        for piece in held.local.pieces:
            values = initial_values(piece.tensor, piece.box, seed, decoders[0].config.initializer_range)
            held.take(piece.start, values.numpy(), dtype, device)


def _coded_layers(decoders: Sequence[Decoder]) -> Iterator[_CodedLayer]:
    for decoder in decoders:
        groupings = coded_groupings(decoder.spec, decoder.tp.size)
        for local in decoder.local_params():
            if local.name in groupings:
                layer = decoder.get_submodule(local.name.removesuffix(".weight"))
                assert isinstance(layer, Layer)
                yield _CodedLayer(local, groupings[local.name], layer, len(local.pieces))
