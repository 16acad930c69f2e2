"""The decoder's stages on this rank. They are built without memory; flat buffers then hold their parameters."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...core.layout import stages
from ...data.batches import MicroBatch
from ...model.balance import RouterBalance
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.recompute import Recompute
from ...model.spec import DecoderSpec
from ...parallel.layers import ExpertRanks, LayerContext
from ...parallel.mesh import Mesh
from ...parallel.token_noise import TokenNoise
from ...parallel.weight_grads import WeightGradQueue
from ..zero.flat_bucket import ParameterBucket
from ..zero.flat_buffers import FlatBuffers
from ..zero.parameter_gather import Unit
from ..zero.states.pinned_copies import PinnedCopies
from .rows import WHOLE_ROWS, Rows, RowsPart


def build_stages(
    config: ModelConfig,
    spec: DecoderSpec,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool,
    weight_grads: WeightGradQueue,
    recompute: Recompute,
    mlp_block: int = 0,
) -> tuple[Decoder, ...]:
    """Builds this rank's stages on the meta device; flat buffers give their parameters memory.

    Args:
        config: the model's shape.
        spec: the description of the decoder.
        mesh: the rank's groups.
        dtype: the dtype of parameters.
        sequence_parallel: whether hidden states are split over tp along the sequence.
        weight_grads: the queue for schedules that defer weight gradients.
        recompute: the activations that backward recomputes.
        mlp_block: see Decoder.

    Raises:
        ParallelError: the layout does not fit the model.
    """
    device, experts = torch.device("meta"), ExpertRanks.of(mesh)
    context = LayerContext(mesh.tp, dtype, device, sequence_parallel, weight_grads, experts)
    return tuple(
        Decoder(
            config,
            context,
            stage=stage,
            recompute=recompute,
            mlp_block=mlp_block,
            spec=spec,
        )
        for stage in stages(spec.table, mesh.layout)[mesh.coordinates.pp]
    )


def gathered_units(decoders: Sequence[Decoder], buffers: FlatBuffers) -> list[list[Unit]]:
    """Returns the units that ZeRO stage 3 gathers at once, for each of the rank's stages, in forward order.

    A unit is a layer, the embeddings before all layers, or the norm and the head after them.
    """
    return [
        _units(decoder, [bucket for bucket in buffers.all_buckets if bucket.plan.stage == number])
        for number, decoder in enumerate(decoders)
    ]


def _units(decoder: Decoder, buckets: Sequence[ParameterBucket]) -> list[Unit]:
    tied = _is_tied(decoder)
    result = []
    for key, modules in _modules(decoder).items():
        mine = [bucket for bucket in buckets if bucket.plan.unit == key]
        if mine:
            result.append(Unit(mine, modules, used_in_backward=tied if key == "first" else True))
    return result


def update_waits(decoders: Sequence[Decoder], buffers: FlatBuffers) -> list[tuple[list[nn.Module], list[int]]]:
    """Returns modules of the rank's stages with the indices of the buckets that hold parameters of theirs."""
    result = []
    for number, decoder in enumerate(decoders):
        for key, modules in _modules(decoder).items():
            held = [
                index
                for index, bucket in enumerate(buffers.buckets)
                if bucket.plan.stage == number and any(param.unit == key for param in bucket.plan.params)
            ]
            if held:
                result.append((modules, held[::-1]))
    return result


def _modules(decoder: Decoder) -> dict[int | str, list[nn.Module]]:
    """Returns the modules of each unit, in forward order."""
    trunk, head = decoder.model, decoder.lm_head
    tied = _is_tied(decoder)
    starts = [trunk.embed_tokens, trunk.embed_positions, head if tied else None]
    units: dict[int | str, list[nn.Module | None]] = {"first": list(starts)}
    units |= {int(name): [layer] for name, layer in trunk.layers.items()}
    units["last"] = [trunk.norm] if tied else [trunk.norm, head]
    return {key: [module for module in modules if module is not None] for key, modules in units.items()}


def _is_tied(decoder: Decoder) -> bool:
    trunk, head = decoder.model, decoder.lm_head
    return head is not None and trunk.embed_tokens is not None and head.weight is trunk.embed_tokens.weight


class StagePass:
    """One stage with the micro-batches of a step, for the pipeline's executor.

    Args:
        decoder: the stage.
        device: the device that computes.
        copies: makes the copies of rows to the device.
        saving: makes the context of a forward pass from the tensor that it has received; see `TrainingEngine.saving`.
        rows: takes this rank's part of micro-batches.

    Attributes:
        micro_batches: the step's micro-batches.
        seed: the seed of dropout, if adapters have it.
        loss_factor: the factor of each micro-batch's summed loss.
        balance_weight, z_weight: see RouterBalance.
        balances: the routers' losses of each of the step's micro-batches so far.
        record_routing: whether `balances` also record the experts of each token.
        loss_waits: whether other passes lie between the forward pass of a loss and its backward. Then forward keeps
            only the head's input, within `saving`; otherwise its memory would only go down and up.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        copies: PinnedCopies,
        saving: Callable[[torch.Tensor | None], AbstractContextManager[object]] = nullcontext,
        rows: Rows = WHOLE_ROWS,
    ) -> None:
        self.decoder = decoder
        self.device = device
        self._copies = copies
        self.saving = saving
        self.rows = rows
        self.loss_waits = False
        self.seed = 0
        self._drops = any(adapter.dropout for adapter in decoder.spec.adapters.values())
        self.micro_batches: Sequence[MicroBatch] = ()
        self.loss_factor = 1.0
        self.balance_weight = self.z_weight = 0.0
        self.balances: list[RouterBalance] = []
        self.record_routing = False

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        """Computes the stage for one micro-batch.

        Args:
            micro_batch: the index of the micro-batch.
            x: hidden states [B, L, D] from the stage before; None on the first stage, which reads tokens.

        Returns:
            Hidden states for the next stage, [B, L, D]; on the last stage the sum of the micro-batch's losses times
            `loss_factor`, an fp64 scalar.
        """
        micro = self.micro_batches[micro_batch]
        part = self.rows.part(micro)
        tokens_BL, targets_BL, positions_BL = map(self._moved, (part.inputs, part.targets, part.positions))
        balance, noise = self._balance(part), self._noise(micro, part)
        with self.saving(x):
            hidden_BLD = self.decoder(tokens_BL if x is None else x, positions_BL, part.attend, balance, noise)
        if not self.decoder.stage.last:
            return hidden_BLD  # type: ignore[no-any-return]
        with self.saving(None) if self.loss_waits else nullcontext():
            return self.decoder.loss(hidden_BLD, targets_BL, self.loss_factor, not self.loss_waits)

    def _noise(self, micro: MicroBatch, part: RowsPart) -> TokenNoise | None:
        """Returns the random numbers of the micro-batch's tokens; None without dropout, as in an evaluation."""
        if not self._drops or not torch.is_grad_enabled():
            return None
        rows, length = part.inputs.shape
        zeros_BL = np.zeros((rows, length), dtype=np.int64)
        rows_BL = zeros_BL + np.arange(micro.first_row, micro.first_row + rows)[:, None]
        places_BL = zeros_BL + np.arange(length) if part.places is None else part.places
        return TokenNoise.of(self.seed, self._moved(rows_BL), self._moved(places_BL))

    def _balance(self, part: RowsPart) -> RouterBalance | None:
        """Returns the micro-batch's balance; padding does not count. None if the routers' losses are not needed."""
        if not (self.balance_weight or self.z_weight or self.record_routing) or not torch.is_grad_enabled():
            return None
        places_BL = None if part.places is None else self._moved(part.places)
        counted_BL = self._moved(part.counted)
        rows = (counted_BL, self.record_routing, places_BL, part.cp)
        self.balances.append(RouterBalance(self.balance_weight, *rows, self.z_weight))
        return self.balances[-1]

    def _moved(self, values: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        return self._copies.moved(torch.from_numpy(values), self.device)
