"""The record of a construction: which operations a tensor depends on."""

import torch

from tk.train.foreign.construction import Construction
from tk.train.foreign.construction_log import ConstructionLog


def _names(log: ConstructionLog, tensor: torch.Tensor) -> list[str]:
    found = log.needed(frozenset({log.place(tensor).slot}), log.length)
    return [each.function._schema.name.removeprefix("aten::") for each in found]


def test_views_are_parts_of_slots_and_need_no_entry() -> None:
    with Construction() as construction:
        values = torch.zeros(4, 4)
        values[1].t()[2:].mul_(3)
        values.detach().view(2, 8)
    assert _names(construction.log, values) == ["zeros", "mul_"]


def test_only_what_a_tensor_depends_on_is_needed() -> None:
    with Construction() as construction:
        left, right = torch.ones(3), torch.ones(3)
        right.mul_(2)
        both = left + right
        left.mul_(3)
    assert _names(construction.log, both) == ["ones", "ones", "mul_", "add"]
    assert _names(construction.log, left) == ["ones", "mul_"]


def test_values_that_are_overwritten_throughout_are_not_needed() -> None:
    with Construction() as construction:
        values = torch.empty(2, 2).uniform_()
        values.mul_(2)
        values.normal_()
        part = torch.empty(2, 2).uniform_()
        part[0].zero_()
    assert _names(construction.log, values) == ["normal_"]
    assert _names(construction.log, part) == ["empty", "uniform_", "zero_"][1:]


def test_old_values_are_needed_where_new_ones_come_from_them() -> None:
    with Construction() as construction:
        values = torch.rand(3)
        values.copy_(torch.where(values > 0.5, values, 0.0))
    assert _names(construction.log, values) == ["rand", "gt", "scalar_tensor", "where", "copy_"]


def test_values_from_before_the_block_are_kept_as_they_were() -> None:
    given = torch.ones(3)
    with Construction() as construction:
        made = given + 1
        given.mul_(5)
    slot = construction.log.place(given).slot
    kept = construction.log.constants[slot]
    assert torch.empty(0).set_(kept, 0, (3,), (1,)).tolist() == [1, 1, 1]
    assert _names(construction.log, made) == ["add"]
