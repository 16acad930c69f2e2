"""Decoders of every architecture with initial weights, and their gradients by logical tensor, for comparisons."""

from typing import Any

import torch

from tk.core.geometry import Box
from tk.data.batches import MicroBatch
from tk.model.balance import RouterBalance
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.init import initialize_weights
from tk.model.spec import DecoderSpec
from tk.parallel.collectives import all_reduce
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.tests.model.architectures import ENTRIES, VOCAB
from tk.train.engine.attention import causal_attention
from tk.train.engine.row_packer import RowPacker
from tk.train.engine.stages import StagePass

CPU = torch.device("cpu")
BATCH, LENGTH = 2, 16
Gradients = dict[tuple[str, Box], torch.Tensor]


def config_of(name: str, **changes: Any) -> ModelConfig:
    """Returns the config of an entry, with changes of its fields."""
    made = ModelConfig.from_json(ENTRIES[name].make_config().to_dict())
    types: dict[str, Any] = {"layer_types": ()} if "num_hidden_layers" in changes else {}  # of so many layers
    return ModelConfig.model_validate(made.model_dump() | types | changes)


def build(config: ModelConfig, tp: Group, **options: Any) -> Decoder:
    """Builds a decoder with the initial weights of seed 3."""
    shared = {name: options.pop(name) for name in ("sequence_parallel", "weight_grads") if name in options}
    decoder = Decoder(config, LayerContext(tp, torch.float32, CPU, **shared), **options)
    initialize_weights(decoder, seed=3)
    return decoder


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns inputs, their positions and targets, [B, L] each."""
    drawn = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], torch.arange(LENGTH).expand(BATCH, LENGTH), drawn[:, 1:]


def loss_of(decoder: Decoder, hidden_BLD: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss on the targets, from the last stage's hidden states."""
    targets_BL = tokens()[2]
    return decoder.loss(hidden_BLD, targets_BL, 1 / targets_BL.numel())


def whole_loss(
    decoder: Decoder,
    tokens_BL: torch.Tensor,
    targets_BL: torch.Tensor,
    documents: tuple[int, ...] = (),
    loss_waits: bool = False,
) -> torch.Tensor:
    """Returns the summed loss of a micro-batch as training computes it, on a decoder of one stage."""
    stage = StagePass(decoder, CPU)
    stage.loss_waits = loss_waits
    rows = MicroBatch(tokens_BL.numpy(), targets_BL.numpy(), documents)
    stage.micro_batches = RowPacker([decoder], CPU).pack([rows])
    return stage.forward(0, None)


def backward(decoder: Decoder, balance: RouterBalance | None = None) -> torch.Tensor:
    """Runs forward and backward of a whole decoder; returns the loss."""
    inputs, positions, _ = tokens()
    loss = loss_of(decoder, decoder(inputs, positions, causal_attention, balance))
    loss.backward()
    return loss.detach()


def gradients(decoder: Decoder, mesh: Mesh | None = None) -> Gradients:
    """Returns this rank's gradient of every piece of every parameter, by tensor and box.

    With a mesh, partial gradients are summed over its ranks, as `Decoder` documents.
    """
    found = {}
    for local in (each for each in decoder.local_params() if each.trainable):
        gradient = decoder.get_parameter(local.name).grad
        assert gradient is not None, local.name
        for piece in local.pieces:
            part = gradient.reshape(-1)[piece.start : piece.start + piece.box.size]
            tensor = piece.tensor
            if mesh and (tensor.partial_grad or (decoder.sequence_parallel and tensor.split is None)):
                all_reduce(part, mesh.tp)
            elif mesh and piece.num_holders > 1:
                all_reduce(part, mesh.kv_heads)
            found[tensor.name, piece.box] = part.view(piece.box.shape)
    return found


def compare_with_one_process(
    mesh: Mesh, name: str, balance_weight: float = 0.0, spec: DecoderSpec | None = None, **options: Any
) -> None:
    """Compares loss and gradients of a decoder with options, on this rank, with a plain decoder on one process.

    Args:
        spec: the description of both decoders, if it is not that of the config.
    """
    whole, mine = build(config_of(name), ALONE, spec=spec), build(config_of(name), mesh.tp, spec=spec, **options)
    balances = [RouterBalance(balance_weight, z_weight=balance_weight / LENGTH) for _ in range(2)]
    torch.testing.assert_close(backward(mine, balances[0]), backward(whole, balances[1]), rtol=1e-6, atol=1e-6)
    totals = [torch.as_tensor([balance.total(), balance.z_total()]) for balance in balances]
    torch.testing.assert_close(*totals, rtol=1e-5, atol=1e-6)
    expected = {tensor: gradient for (tensor, _), gradient in gradients(whole).items()}
    whole_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for (tensor, box), gradient in gradients(mine, mesh).items():
        wanted = expected[tensor][box.slices]
        # Relative to all gradients, too: that of a key's bias is a small difference of large terms.
        off = (gradient - wanted).norm() / (wanted.norm() + 1e-2 * whole_norm)
        assert off < 2e-5, f"{name}: {tensor} {box}: {off}"
