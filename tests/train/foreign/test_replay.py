"""Values that are made later are those of an ordinary construction."""

import torch

from tk.tests.train.foreign.random_module import Noisy, built_twice
from tk.train import initialize, on_meta
from tk.train.foreign.construction_log import ConstructionLog
from tk.train.foreign.replay import value_of


def test_random_numbers_are_those_of_an_ordinary_construction() -> None:
    ordinary, absent = built_twice(Noisy)
    for name, buffer in ordinary.named_buffers():
        assert torch.equal(buffer, absent.get_buffer(name)), name
    assert (absent.largest, absent.listed) == (ordinary.largest, ordinary.listed)
    torch.manual_seed(77)  # of no effect on values that are made later
    initialize(absent)
    there = absent.state_dict()
    for name, value in ordinary.state_dict().items():
        assert torch.equal(value, there[name]), name
    assert torch.equal(absent.plain, ordinary.plain)


def test_the_same_values_come_again_whatever_the_order() -> None:
    torch.manual_seed(0)
    with on_meta():
        first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    torch.manual_seed(0)
    expected = [torch.nn.Linear(3, 3).weight for _ in range(2)]
    for number in (1, 0, 1):
        weight = (first, second)[number].weight
        log = ConstructionLog.of(weight)
        assert log is not None
        assert torch.equal(value_of(log, weight), expected[number])
    assert first.weight.is_meta


def test_a_value_in_another_default_dtype_is_made_in_that_one() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with on_meta():
            module = torch.nn.Embedding(3, 2)
            with torch.no_grad():
                module.weight.copy_(torch.arange(6).view(3, 2) / 3)
    finally:
        torch.set_default_dtype(before)
    log = ConstructionLog.of(module.weight)
    assert log is not None
    assert torch.equal(value_of(log, module.weight), (torch.arange(6).view(3, 2) / 3).bfloat16())
