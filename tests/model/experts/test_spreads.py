"""Mixtures of experts over ranks against `transformers`' blocks in one process: outputs and every gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tk.core.layout import Layout, Stage
from tk.model.config import ModelConfig
from tk.model.experts.mixture import MixtureOfExperts
from tk.model.placement import Placement
from tk.model.recompute import Recompute
from tk.model.registry import decoder_spec
from tk.model.spec import ExpertsSpec
from tk.parallel import row_exchange
from tk.parallel.collectives import PendingResult, all_reduce, start_all_to_all
from tk.parallel.layers import ExpertRanks, LayerContext
from tk.parallel.mesh import Mesh
from tk.tests.rank_pool import RankPool

HIDDEN, INNER, EXPERTS = 32, 24, 8
SHARED = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 3,
    "experts_implementation": "eager",
}
CONFIGS = {
    "mixtral": MixtralConfig(intermediate_size=INNER, num_local_experts=EXPERTS, **SHARED),
    "qwen2_moe": Qwen2MoeConfig(
        moe_intermediate_size=INNER, num_experts=EXPERTS, shared_expert_intermediate_size=2 * INNER, **SHARED
    ),
    "qwen3_moe": Qwen3MoeConfig(
        moe_intermediate_size=INNER, num_experts=EXPERTS, norm_topk_prob=False, head_dim=8, **SHARED
    ),
}
BLOCKS = {"mixtral": MixtralSparseMoeBlock, "qwen2_moe": Qwen2MoeSparseMoeBlock, "qwen3_moe": Qwen3MoeSparseMoeBlock}
# How tokens choose: by chance; all of them the experts 4 to 6, so that the others have no token; the first half of
# them so, which needs more rounds than the other half; or experts that move from one data rank to the next.
ROUTINGS = ("chance", "hot", "half hot", "moving")
STACKED = ("experts.gate_up_proj", "experts.down_proj")
UNEVEN = (7, 0, 12, 3)  # tokens of each data rank


@dataclass(frozen=True)
class Batch:
    """The tokens of one data rank, and the gradient of its outputs, [T, D]."""

    x_TD: torch.Tensor
    grad_TD: torch.Tensor


def batch_of(data: int, num_tokens: int, routing: str) -> Batch:
    generator = torch.Generator().manual_seed(data)
    x_TD, grad_TD = (torch.randn(num_tokens, HIDDEN, generator=generator) for _ in range(2))
    x_TD[:, :EXPERTS] = 0.1 * x_TD[:, :EXPERTS]
    if routing in ("hot", "half hot"):
        x_TD[: num_tokens if routing == "hot" else num_tokens // 2, 4:7] += torch.tensor([3.0, 2.5, 2.0])
    if routing == "moving":
        x_TD[:, [(2 * data) % EXPERTS, (2 * data + 1) % EXPERTS]] += 3.0
    return Batch(x_TD, grad_TD)


def reference(name: str) -> nn.Module:
    """Returns `transformers`' block, whose router reads a token's first features as scores, and others a little."""
    block: nn.Module = BLOCKS[name](CONFIGS[name])
    generator = torch.Generator().manual_seed(100)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        block.get_parameter("gate.weight").mul_(0.2)[:, :EXPERTS] += 2 * torch.eye(EXPERTS)
    return block


def mixture_at(name: str, mesh: Mesh, block: nn.Module, recompute: Recompute, **options: Any) -> MixtureOfExperts:
    """Returns this rank's part of the block."""
    spec = decoder_spec(ModelConfig.from_json(CONFIGS[name].to_dict()))
    context = LayerContext(mesh.tp, torch.float32, torch.device("cpu"), experts=ExpertRanks.of(mesh), **options)
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec)
    mixture = MixtureOfExperts(0, experts, Placement(spec, context, Stage(range(1)), recompute))
    with torch.no_grad():
        mixture.gate.weight.copy_(block.get_parameter("gate.weight"))
        gate_up, down = own_part([block.get_parameter(name) for name in STACKED], mesh)
        mixture.experts.gate_up_proj.copy_(gate_up)
        mixture.experts.down_proj.copy_(down)
        for mine, whole in shared_weights(mixture, block, mesh):
            mine.copy_(whole)
    return mixture


def shared_weights(
    mixture: MixtureOfExperts, block: nn.Module, mesh: Mesh, of: Callable[[torch.Tensor], torch.Tensor] = torch.detach
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns this rank's weights of the shared expert, each with what belongs there: by default the block's weight."""
    if mixture.shared_expert is None:
        return []
    assert mixture.shared_expert_gate is not None
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (of(block.get_parameter(f"shared_expert.{name}.weight")) for name in names)
    tp = mesh.tp
    return [
        (
            mixture.shared_expert.gate_up_proj.weight,
            torch.cat([each.chunk(tp.size)[tp.rank] for each in (gate, up)]),
        ),
        (mixture.shared_expert.down_proj.weight, down.chunk(tp.size, dim=1)[tp.rank]),
        (mixture.shared_expert_gate.weight, of(block.get_parameter("shared_expert_gate.weight"))),
    ]


def own_part(stacked: list[torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rank's part of weights, or of gradients, [E, 2I, D] and [E, D, I], one expert below the other."""
    place = mesh.layout.experts.place(mesh.world.rank)
    spread = mesh.layout.experts
    gate_up, down = (each.detach().chunk(spread.ep)[place.ep] for each in stacked)
    gate_up = gate_up.unflatten(1, (2, spread.tp, -1))[:, :, place.tp].flatten(1, 2)
    return gate_up.flatten(0, 1), down.chunk(spread.tp, dim=2)[place.tp].flatten(0, 1)


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def close(mine: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    off = (mine - expected).norm() / (expected.norm() + 1e-6)
    assert off < 1e-5, f"{what}: {off}"


def flights(mesh: Mesh, at_once: bool) -> tuple[list[str], list[torch.Tensor]]:
    """Returns what happens in forward and backward of a mixture, in order, and its outputs and gradients.

    Args:
        at_once: whether an exchange ends before anything else begins.
    """
    events: list[str] = []

    def arrive(rows: torch.Tensor) -> torch.Tensor:
        events.append("arrive")
        return rows

    def start(*arguments: Any) -> PendingResult:
        events.append("leave")
        pending = start_all_to_all(*arguments)
        if at_once:
            pending = PendingResult(pending.wait())
        return pending.then(arrive)

    mixture = mixture_at("qwen2_moe", mesh, reference("qwen2_moe"), "none")
    assert mixture.shared_expert is not None
    mixture.shared_expert.register_forward_hook(lambda *_: events.append("shared"))
    for name, parameter in mixture.shared_expert.named_parameters():
        parameter.register_hook(lambda _, name=name: events.append(name.removesuffix("_proj.weight")))
    batch = batch_of(mesh.coordinates.dp, 9, "chance")
    x_TD = batch.x_TD.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_exchange, "start_all_to_all", start)
        y_TD = mixture(x_TD)
        y_TD.backward(batch.grad_TD)
    return events, [y_TD, gradient(x_TD), *map(gradient, mixture.parameters())]


def check_flights(axes: dict[str, Any]) -> None:
    mesh = Mesh.build(Layout(**axes), num_kv_heads=2)
    events, values = flights(mesh, at_once=False)
    forward = ["leave", "shared", "arrive", "leave", "arrive"]
    assert events == [*forward, "leave", "arrive", "leave", "down", "gate_up", "arrive"]
    assert all(map(torch.equal, values, flights(mesh, at_once=True)[1]))


def check(axes: dict[str, Any], names: list[str], recompute: Recompute, sequence_parallel: bool = False) -> None:
    """Compares one rank's outputs and gradients with those of all tokens in one process."""
    world = torch.distributed.get_world_size()
    layout = Layout(dp=world // axes.get("tp", 1), **axes)
    mesh = Mesh.build(layout, num_kv_heads=2)
    for name in names:
        for routing in ROUTINGS:
            compare(name, mesh, routing, recompute, sequence_parallel)


def compare(name: str, mesh: Mesh, routing: str, recompute: Recompute, sequence_parallel: bool) -> None:
    layout, data = mesh.layout, mesh.coordinates.dp
    even = sequence_parallel or layout.experts.tp > layout.tp
    sizes = [8] * layout.dp if even else UNEVEN[: layout.dp]
    batches = [batch_of(number, size, routing) for number, size in enumerate(sizes)]
    block = reference(name)
    x_TD = torch.cat([batch.x_TD for batch in batches]).requires_grad_()
    expected = block(x_TD.unsqueeze(0)).squeeze(0)
    expected.backward(torch.cat([batch.grad_TD for batch in batches]))

    mixture = mixture_at(name, mesh, block, recompute, sequence_parallel=sequence_parallel)
    part = slice(None)
    if sequence_parallel:
        size = sizes[data] // mesh.tp.size
        part = slice(mesh.tp.rank * size, (mesh.tp.rank + 1) * size)
    own_TD = batches[data].x_TD[part].clone().requires_grad_()
    y_TD = mixture(own_TD)
    y_TD.backward(batches[data].grad_TD[part])

    label = f"{name}, {routing}, {layout}"
    close(y_TD, expected.split(list(sizes))[data][part], label)
    close(gradient(own_TD), gradient(x_TD).split(list(sizes))[data][part], f"{label}: hidden states")
    router = gradient(mixture.gate.weight)
    for group in (mesh.tp, mesh.replicate):
        router = all_reduce(router, group)
    close(router, gradient(block.get_parameter("gate.weight")), f"{label}: router")
    for mine, wanted in shared_weights(mixture, block, mesh, gradient):
        total = gradient(mine)
        # each rank has multiplied its part of the output by the gate, whose gradient is partial
        groups = (mesh.tp, mesh.replicate) if mine.shape[0] == 1 else (mesh.replicate,)
        for group in groups:
            total = all_reduce(total, group)
        close(total, wanted, f"{label}: shared expert")
    gradients = own_part([gradient(block.get_parameter(name)) for name in STACKED], mesh)
    for parameter, wanted in zip((mixture.experts.gate_up_proj, mixture.experts.down_proj), gradients, strict=True):
        total = all_reduce(gradient(parameter), mesh.expert_replicate)
        for number, (mine, other) in enumerate(
            zip(total.chunk(mixture.experts.num_experts), wanted.chunk(mixture.experts.num_experts), strict=True)
        ):
            close(mine, other, f"{label}: expert {number} of the rank")


@pytest.mark.every(3)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    "axes",
    [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 1, "expert_tp": 1, "tp": 2}, {"ep": 1, "expert_tp": 2}],
    ids=str,
)
def test_two_ranks_compute_the_block_of_transformers(rank_pool: RankPool, axes: dict[str, Any], recompute: str) -> None:
    rank_pool.run(check, 2, axes=axes, names=list(CONFIGS), recompute=recompute)


@pytest.mark.every(3)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    "axes",
    [{"ep": 4}, {"ep": 2}, {"ep": 4, "tp": 2}, {"ep": 2, "tp": 4}, {"ep": 2, "expert_tp": 2, "tp": 2}],
    ids=str,
)
def test_four_ranks_compute_the_block_of_transformers(
    rank_pool: RankPool, axes: dict[str, Any], recompute: str
) -> None:
    rank_pool.run(check, 4, axes=axes, names=["mixtral"], recompute=recompute)


@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_the_shared_expert_is_computed_while_tokens_are_on_their_way(rank_pool: RankPool, axes: dict[str, int]) -> None:
    rank_pool.run(check_flights, 2, axes=axes)


def test_ranks_that_exchange_with_others_may_need_more_rounds(rank_pool: RankPool) -> None:
    """Two ep groups in one tensor-parallel group, whose shared expert all four ranks compute together."""
    axes = {"tp": 4, "ep": 2}
    rank_pool.run(check, 4, axes=axes, names=["qwen2_moe"], recompute="selective", sequence_parallel=True)


@pytest.mark.parametrize("axes", [{"ep": 2, "tp": 2}, {"ep": 2, "expert_tp": 2, "tp": 2}], ids=str)
def test_tokens_that_are_split_already_are_not_dealt_again(rank_pool: RankPool, axes: dict[str, Any]) -> None:
    rank_pool.run(check, 4, axes=axes, names=["qwen2_moe", "qwen3_moe"], recompute="none", sequence_parallel=True)
