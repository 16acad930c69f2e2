"""A mixture of experts without a wait of the host: pairs of tokens and experts, sorted by expert on the device.

Letters: T tokens, K experts of each, P = T K pairs, E experts, D hidden size, I intermediate size, F out features.
"""

import torch

from ....program.operations import RunExperts
from ...aten.expert_products import ExpertRows
from ...aten.experts import Routing
from ..step.device_tables import ExpertPairs
from ..step.step_adapters import StepAdapters, pair_tiles
from .kernels import GpuKernels


def run_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    gate_up: ExpertRows,
    down: ExpertRows,
    operation: RunExperts,
    kernels: GpuKernels,
    adapters: StepAdapters | None = None,
    num_numbers: int = 1,
) -> torch.Tensor:
    """Maps tokens [T, D] to this rank's part of the weighted sums of their experts, [T, D].

    Args:
        x_TD: the tokens.
        routing: their experts.
        gate_up, down: the weights of all experts, one below the other: [E * 2I, D] and [E * D, I].
        operation: their sizes.
        kernels: what multiplies.
        adapters: those of the tokens, if some may have factors of experts; None if not.
        num_numbers: one more than the slots of adapters.
    """
    top_k = routing.chosen_TK.shape[1]
    keys_TK = routing.chosen_TK
    if adapters is not None:
        keys_TK = keys_TK * num_numbers + adapters.numbers.unsqueeze(-1)
    keys_P, by_expert_P = keys_TK.flatten().sort(stable=True)
    experts_P = keys_P if adapters is None else keys_P // num_numbers
    numbers_E = torch.arange(operation.num_experts, device=x_TD.device)
    pairs = ExpertPairs(experts_P.int(), torch.searchsorted(experts_P, numbers_E, right=True).int())
    tiles = None if adapters is None else pair_tiles(keys_P, operation.num_experts * num_numbers)

    def product(name: str, rows_PD: torch.Tensor, weight: ExpertRows) -> torch.Tensor:
        if tiles is None:
            return kernels.expert_product(rows_PD, weight, pairs)
        return kernels.add_adapters(name, rows_PD, kernels.expert_product(rows_PD, weight, pairs, False), tiles)

    inner_PF = product(operation.gate_up, x_TD[by_expert_P // top_k], gate_up)
    y_PD = product(operation.down, kernels.gate(inner_PF, "swiglu"), down)
    place_P = torch.empty_like(by_expert_P)
    place_P[by_expert_P] = torch.arange(len(place_P), device=place_P.device)
    y_TKD = y_PD[place_P].float().unflatten(0, (-1, top_k))
    sum_TD: torch.Tensor = (y_TKD * routing.weights_TK.unsqueeze(-1)).sum(dim=1).to(x_TD.dtype)
    return sum_TD
