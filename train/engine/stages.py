"""The decoder's stages on this rank. They are built without memory; flat buffers then hold their parameters."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ...core.layout import stages
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
from .row_packer import PackedRows


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
        saving: makes the context of a forward pass from the tensor that it has received; see `TrainingEngine.saving`.

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
        saving: Callable[[torch.Tensor | None], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.decoder = decoder
        self.device = device
        self.saving = saving
        self.loss_waits = False
        self.seed = 0
        self._drops = any(adapter.dropout for adapter in decoder.spec.adapters.values())
        self.micro_batches: Sequence[PackedRows] = ()
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
        rows = self.micro_batches[micro_batch]
        values = rows.on(self.device)
        balance, noise = self._balance(rows), self._noise(rows)
        with self.saving(x):
            received = values["inputs"] if x is None else x
            hidden_BLD = self.decoder(received, values["positions"], rows.attend, balance, noise)
        if not self.decoder.stage.last:
            return hidden_BLD  # type: ignore[no-any-return]
        with self.saving(None) if self.loss_waits else nullcontext():
            return self.decoder.loss(hidden_BLD, values["targets"], self.loss_factor, not self.loss_waits)

    def _noise(self, rows: PackedRows) -> TokenNoise | None:
        """Returns the random numbers of the micro-batch's tokens; None without dropout, as in an evaluation."""
        if not self._drops or not torch.is_grad_enabled():
            return None
        num_rows, length = rows.shape
        rows_B1 = torch.arange(rows.first_row, rows.first_row + num_rows, device=self.device).unsqueeze(1)
        places_BL = rows.on(self.device).get("places")
        return TokenNoise.of(
            self.seed, rows_B1, torch.arange(length, device=self.device) if places_BL is None else places_BL
        )

    def _balance(self, rows: PackedRows) -> RouterBalance | None:
        """Returns the micro-batch's balance; padding does not count. None if the routers' losses are not needed."""
        values = rows.on(self.device)
        is_needed = self.balance_weight or self.z_weight or self.record_routing
        if not is_needed or "counted" not in values or not torch.is_grad_enabled():
            return None
        tokens = (values["counted"] != 0, self.record_routing, values.get("places"), rows.cp)
        self.balances.append(RouterBalance(self.balance_weight, *tokens, self.z_weight))
        return self.balances[-1]
