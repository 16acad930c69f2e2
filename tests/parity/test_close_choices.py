"""Choices of experts that rounding could change are seen, and a reference that has one is made with another seed."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tk.core.layout import Stage
from tk.model.experts.router import Router
from tk.model.placement import Placement
from tk.model.registry import decoder_spec
from tk.model.spec import ExpertsSpec
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.parity.close_choices import CloseChoices
from tk.parity.layout import ParityLayout
from tk.parity.pool import Outcome, Pool, PoolJob
from tk.parity.run import SEEDS, ParityRun
from tk.parity.subject import Subject
from tk.tests.model.decoders import config_of


def router_of(architecture: str, **options: Any) -> Router:
    """Returns a router of 4 experts that reads a token's first features as their scores; a token takes 2."""
    config = config_of(
        architecture, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=32, **options
    )
    spec = decoder_spec(config)
    rule = spec.layers[1].feed_forward
    assert isinstance(rule, ExpertsSpec)
    place = Placement(spec, LayerContext(ALONE, torch.float32, torch.device("cpu")), Stage(range(2)))
    router = Router("model.layers.1.mlp.gate", rule, place)
    with torch.no_grad():
        router.weight.zero_()[:, :4] = torch.eye(4)
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.zero_()
    return router


def tokens(*scores: tuple[float, ...]) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(scores), (0, 28))


@pytest.mark.parametrize(("architecture", "options"), [("mixtral", {}), ("glm4_moe", {"n_group": 1, "topk_group": 1})])
def test_only_a_tie_at_the_last_chosen_expert_is_close(architecture: str, options: dict[str, int]) -> None:
    router = router_of(architecture, **options)
    choices = CloseChoices([router])
    router(tokens((1.0, 0.9, 0.8, 0.7), (1.0, 1.0, 0.8, 0.8), (1.0, 0.9, 0.9 - 1e-4, 0.7)))
    assert choices.take() == 0
    router(tokens((1.0, 0.9, 0.9 - 1e-7, 0.7), (0.9, 0.9, 0.9, 0.7), (1.0, 0.9, 0.8, 0.7)))
    assert choices.take() == 2
    assert choices.take() == 0


def test_the_bias_decides_what_is_close() -> None:
    router = router_of("glm4_moe", n_group=1, topk_group=1)
    assert router.e_score_correction_bias is not None
    with torch.no_grad():
        router.e_score_correction_bias[2] = -0.5
    choices = CloseChoices([router])
    router(tokens((1.0, 0.9, 0.9, 0.7)))
    assert choices.take() == 0


class PoolStandIn:
    """A pool whose references have a close choice with the seeds below `good`."""

    def __init__(self, good: int) -> None:
        self.good = good
        self.seeds: list[int] = []

    def run(self, jobs: Iterable[PoolJob]) -> Iterator[Outcome]:
        for job in jobs:
            seed = job.payload["config"]["train"]["seed"]
            self.seeds.append(seed)
            close = [0, 0, int(seed < self.good)]
            yield Outcome(job, ({"loss": [1.0], "grad_norm": [1.0], "routing": [0.0], "close": close},))


@pytest.mark.parametrize(("good", "seed"), [(0, 0), (3, 3), (100, SEEDS - 1)])
def test_a_reference_with_a_close_choice_is_made_with_the_next_seed(tmp_path: Path, good: int, seed: int) -> None:
    layout, pool = ParityLayout(dp=2, experts="mixtral"), PoolStandIn(good)
    run = ParityRun(Subject.built_in(tmp_path, 10, "fp32"), tmp_path, 2)
    run._make_references(cast(Pool, pool), [layout])
    assert pool.seeds == list(range(seed + 1))
    assert [reference.seed for reference in run.references.values()] == [seed]
    assert run._job(layout).payload["config"]["train"]["seed"] == seed, "the layout's seed is that of its reference"


def test_a_model_of_the_users_keeps_its_seed(tmp_path: Path) -> None:
    config = Subject.built_in(tmp_path, 10, "fp32").base
    pool, run = PoolStandIn(100), ParityRun(Subject.of(config, 10, None), tmp_path, 2)
    run._make_references(cast(Pool, pool), [ParityLayout(dp=2)])
    assert pool.seeds == [config.train.seed]
