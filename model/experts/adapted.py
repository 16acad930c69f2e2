"""Low-rank adapters of the experts of a layer: each expert has its own.

Letters: P pairs of a token and one of its experts, E experts of this rank, D in features, F out features of one
expert, R the ranks of all adapters of one expert's parameter, r the rank of one.
"""

from collections.abc import Mapping

import torch
from torch import nn

from ...parallel.grouped_products import grouped_linear
from ...parallel.row_groups import RowGroups
from ..lora.table import factor_name, leaf
from ..placement import Placement


class ExpertAdapters(nn.Module):
    """The adapters of one parameter of all experts, whose factors are stacked as the experts' weights are.

    Args:
        num_experts: E.
        scales: the factor of each projection's product, by name; 0 for projections without an adapter.
        a: A of all experts, [E R, D].
        b: B of all experts, [E F, r], of each projection with an adapter.
        rows: the out features of each projection on this rank.
    """

    def __init__(
        self,
        num_experts: int,
        scales: Mapping[str, float],
        a: nn.Parameter,
        b: Mapping[str, nn.Parameter],
        rows: Mapping[str, int],
    ) -> None:
        super().__init__()
        self.num_experts, self.scales, self.rows = num_experts, dict(scales), dict(rows)
        self.A = a
        self.B = nn.ParameterDict(b)

    @staticmethod
    def of(name: str, num_experts: int, place: Placement) -> "ExpertAdapters | None":
        """Builds the adapters of a parameter of experts by its full name; None if it has none."""
        if factor_name(name, "A") not in place.shapes:
            return None
        tensors = [piece.tensor for piece in place.pieces(name) if piece.tensor.expert is not None]
        first = [tensor for tensor in tensors if tensor.expert == tensors[0].expert]
        adapters = {leaf(tensor.name): place.spec.adapters.get(tensor.name) for tensor in first}
        rows = place.shapes[name][0] // num_experts // len(first)
        b = {key: place.empty(factor_name(name, f"B.{key}")) for key, adapter in adapters.items() if adapter}
        scales = {key: adapter.scale if adapter else 0.0 for key, adapter in adapters.items()}
        a = place.empty(factor_name(name, "A"))
        return ExpertAdapters(num_experts, scales, a, b, dict.fromkeys(adapters, rows))

    def forward(self, x_PD: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """Maps tokens [P, D] to the adapters' outputs [P, F]; see `Experts`."""
        u_PR = grouped_linear(x_PD, self.A.unflatten(0, (self.num_experts, -1)), groups)
        b = {key: values.unflatten(0, (self.num_experts, -1)) for key, values in self.B.items()}
        parts, rank = [], 0
        for key, rows in self.rows.items():
            if key not in b:
                parts.append(u_PR.new_zeros(len(u_PR), rows))
                continue
            own_Pr = u_PR[:, rank : rank + b[key].shape[-1]].contiguous()
            parts.append(grouped_linear(own_Pr, b[key], groups) * self.scales[key])
            rank += b[key].shape[-1]
        return torch.cat(parts, dim=-1)
