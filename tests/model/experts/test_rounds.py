"""The memory of a rank whose experts all tokens choose, counted by every tensor that lives: rounds keep it bounded."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tk.core.layout import Layout, Stage
from tk.model.config import ModelConfig
from tk.model.experts import exchange_plan
from tk.model.experts.mixture import MixtureOfExperts
from tk.model.placement import Placement
from tk.model.recompute import recomputed
from tk.model.registry import decoder_spec
from tk.model.spec import ExpertsSpec
from tk.parallel.collectives import all_gather
from tk.parallel.layers import ExpertRanks, LayerContext
from tk.parallel.mesh import Mesh
from tk.tests.model.decoders import config_of
from tk.tests.rank_pool import RankPool

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 512, 32, 128, 8, 2


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all memory that operations allocate inside it, as long as it lives.

    Attributes:
        peak: the most bytes at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def mixture_at(mesh: Mesh) -> MixtureOfExperts:
    """Returns this rank's part of a mixture whose router reads a token's first features as scores."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    config: ModelConfig = config_of("mixtral", num_hidden_layers=1, num_experts_per_tok=TOP_K, **sizes)
    spec = decoder_spec(config)
    context = LayerContext(mesh.tp, torch.float32, torch.device("cpu"), experts=ExpertRanks.of(mesh))
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec)
    mixture = MixtureOfExperts(0, experts, Placement(spec, context, Stage(range(1)), "full"))
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        mixture.gate.weight.zero_()[:, :EXPERTS] = torch.eye(EXPERTS)
    return mixture


def peak_of(mixture: MixtureOfExperts, chosen_TK: torch.Tensor) -> int:
    """Returns the peak of forward and backward of a layer that is recomputed, for tokens that choose so."""
    x_TD = 0.1 * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    x_TD.scatter_add_(1, chosen_TK, torch.tensor([9.0, 8.0]).expand(TOKENS, TOP_K)).requires_grad_()
    counted = LiveBytes()
    with counted:
        recomputed(mixture, x_TD).square().sum().backward()
    for parameter in mixture.parameters():
        assert parameter.grad is not None, "the gradients of a rank without tokens are zeros"
        parameter.grad = None
    return counted.peak


def measure(headroom: float) -> dict[str, float]:
    """Returns the largest peak of a rank if all tokens choose the experts of one, and if they spread evenly."""
    mesh = Mesh.build(Layout(dp=4, ep=4), num_kv_heads=2)
    mixture = mixture_at(mesh)
    numbers_T1 = torch.arange(TOKENS).unsqueeze(1)
    even_TK = torch.cat([numbers_T1, numbers_T1 + 4], dim=1) % EXPERTS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "HEADROOM", headroom)
        own = {name: peak_of(mixture, chosen) for name, chosen in (("even", even_TK), ("hot", even_TK % TOP_K))}
    return {name: float(max(all_gather(torch.tensor(peak), mesh.world))) for name, peak in own.items()}


def test_all_tokens_to_the_experts_of_one_rank_need_time_and_not_memory(rank_pool: RankPool) -> None:
    bounded = rank_pool.run(measure, 4, headroom=exchange_plan.HEADROOM)[0]
    assert bounded["hot"] <= 1.5 * bounded["even"]
    whole = rank_pool.run(measure, 4, headroom=100.0)[0]
    assert whole["hot"] > 2 * whole["even"], "in one round the rank needs the memory of all tokens at once"
