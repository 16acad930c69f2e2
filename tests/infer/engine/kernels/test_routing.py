"""Routers of models in bf16 score in fp32, in training and in both backends of serving: all choose the same experts."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tk.core.dtypes import BF16
from tk.core.layout import Stage
from tk.infer.engine.kernels.aten.experts import choose_experts
from tk.infer.engine.kernels.native.binding.library import instruction_sets, load_kernels
from tk.infer.engine.kernels.native.packing import Stack
from tk.infer.engine.program.lower import lower
from tk.infer.engine.program.operations import Route
from tk.model.experts.router import Router
from tk.model.placement import Placement
from tk.model.spec import ExpertsSpec
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.tests.infer.engine.kernels.aten.test_prepared_weights import prepared
from tk.tests.infer.engine.kernels.native.products import multiply
from tk.tests.infer.engine.program.test_lower import spec_of

TOKENS, EXPERTS, TOP_K = 2000, 128, 8


def served(architecture: str, x_TD: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, Router]]:
    """Yields a backend, the experts that it chooses for each token, and training's router with the same weights."""
    spec = spec_of(architecture, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    program = lower(spec)
    weights, given = prepared(program, BF16)
    route = next(each for each in program.operations if isinstance(each, Route))
    name = route.matrix.name.removesuffix(".weight")
    rule = next(layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, ExpertsSpec))
    context = LayerContext(ALONE, torch.bfloat16, torch.device("cpu"))
    router = Router(name, rule, Placement(spec, context, Stage(range(len(spec.layers)))))
    bias_E = 0.05 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) if route.bias else None
    with torch.no_grad():
        router.weight.copy_(weights[route.matrix.name])
        if bias_E is not None:
            assert router.e_score_correction_bias is not None
            router.e_score_correction_bias.copy_(bias_E)
    yield "aten", choose_experts(weights.products(program)[route.matrix.name](x_TD), route, bias_E).chosen_TK, router
    for instruction_set in instruction_sets():
        kernels = load_kernels(instruction_set)
        assert kernels is not None
        stack = Stack(1, route.matrix.in_features, EXPERTS)
        scores = multiply(kernels, stack, given[route.matrix.name], BF16, x_TD.float().numpy())
        yield instruction_set, choose_experts(torch.from_numpy(scores), route, bias_E).chosen_TK, router


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])
def test_training_and_serving_choose_the_same_experts(architecture: str) -> None:
    x_TD = (0.2 * torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(0))).bfloat16()
    for backend, chosen_TK, router in served(architecture, x_TD):
        with torch.no_grad():
            choice = router(x_TD)
            rounded_TE = choice.scores_TE.bfloat16().float()
            weights_TE = rounded_TE.softmax(dim=-1) if architecture == "qwen3_moe" else rounded_TE.sigmoid()
            rounded_TK = router.choose(weights_TE)[1]
        mine = choice.chosen_TK.sort(dim=-1).values
        assert np.array_equal(mine, chosen_TK.sort(dim=-1).values), backend
        moved = (mine != rounded_TK.sort(dim=-1).values).any(dim=-1).float().mean()
        assert moved > 0.01, "scores in bf16 must move some tokens to other experts, else the test sees no rounding"
