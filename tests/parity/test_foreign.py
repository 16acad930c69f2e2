"""The foreign module of a comparison: its data, and torch's own training of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.parity.foreign import LENGTH, VOCAB_SIZE, make_module, micro_batch, run_layout, run_reference
from tk.parity.layout import ParityLayout
from tk.parity.reference_values import ReferenceValues
from tk.parity.subject import MICRO_BATCHES, Subject


def test_every_rank_makes_the_same_module_and_draws_leave_other_randomness_alone() -> None:
    before = torch.random.get_rng_state()
    one, two, other = make_module(1), make_module(1), make_module(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert one.head.weight is one.embed.weight


def test_micro_batches_are_walks_and_no_two_are_equal() -> None:
    drawn = [micro_batch(3, step, number) for step in range(3) for number in range(MICRO_BATCHES)]
    for tokens, targets in drawn:
        assert tokens.shape == targets.shape == (2, LENGTH)
        assert torch.equal(targets[:, :-1], tokens[:, 1:])
        assert ((targets - tokens) % VOCAB_SIZE == 7).all()
    assert len({tuple(tokens.flatten().tolist()) for tokens, _ in drawn}) == len(drawn)


@pytest.mark.parametrize("zero", [0, 3])
def test_initialize_on_one_rank_trains_as_torch_does(zero: Any, tmp_path: Path) -> None:
    config = Subject.built_in(tmp_path, 3, "fp32").config(ParityLayout(foreign=True, zero=zero))
    said: list[Mapping[str, Any]] = []
    values = ReferenceValues(tmp_path, 3)
    expected = run_reference(config, values, said.append)
    assert said == [{"step": 1}, {"step": 2}, {"step": 3}]
    module = make_module(config.train.seed)
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert np.load(values.gradients).shape == np.load(values.weights).shape == (trained,)
    found = run_layout(config, values, said.append)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert found["gradients"] < 1e-5
    assert 0 < found["updates"] < 1e-5
