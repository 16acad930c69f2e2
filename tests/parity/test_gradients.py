"""First gradients: a difference is found, named, and relative to the parameter."""

import math

import numpy as np
import pytest

from tk.parity.gradients import compare_gradients, first_gradients, relative_differences
from tk.parity.judge import common_start, compare_curves
from tk.parity.layout import ParityLayout
from tk.parity.subject import Subject
from tk.train.run.trainer import Trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("alone")
    subject = Subject.built_in(folder, 1, "fp32")
    subject.prepare(folder)
    trainer = Trainer(subject.config(ParityLayout(tied=True)))
    trainer.step()
    return trainer


def test_a_gradient_that_differs_is_found_and_named(trainer: Trainer) -> None:
    buffers, table = trainer.engine.buffers, trainer.spec.table
    expected = first_gradients(buffers, table)
    assert np.isfinite(expected).all()
    assert np.linalg.norm(expected) > 0
    assert compare_gradients(buffers, table, expected)["gradients"] == 0
    name = "model.layers.1.mlp.down_proj.weight"
    sizes = {spec.name: math.prod(spec.shape) for spec in trainer.spec.table if not spec.alias}
    start = sum(sizes[before] for before in list(sizes)[: list(sizes).index(name)])
    here = slice(start, start + sizes[name])
    other = expected.copy()
    other[here] *= 1.001
    found = compare_gradients(buffers, table, other)
    norm, total = np.linalg.norm(other[here]), np.linalg.norm(other)
    assert found["parameter"] == name
    assert found["gradients"] == pytest.approx(0.001 / 1.001 * norm / (norm + 0.01 * total), rel=1e-3)
    other[here] = np.nan
    assert compare_gradients(buffers, table, other)["gradients"] == math.inf


def test_differences_are_relative_to_the_parameter_and_a_little_to_all() -> None:
    assert relative_differences([1e-5, 0.0], [1.0, 0.0]) == [1e-5 / 1.01, 0.0]
    # The rule |g - g0| <= 1e-5 |g0| + 1e-7 |G|, at its edge.
    norms = [3.0, 0.04]
    edge = [1e-5 * norm + 1e-7 * math.hypot(*norms) for norm in norms]
    assert relative_differences(edge, norms) == pytest.approx([1e-5, 1e-5], rel=1e-9)
    assert compare_curves([2.0, 3.0], [2.0, 4.0]) == 0.25
    assert [common_start(mine, [1.0, 2.0]) for mine in ([1.0, 2.0], [1.0, 3.0], [0.0, 2.0])] == [2, 1, 0]
