"""The axes: each names a field of a layout, a key of a configuration and earlier axes, and the page lists them."""

import re
from pathlib import Path
from typing import Any

import pytest

from tk.parity.axes import AXES, FOREIGN_AXES, ParityAxis
from tk.parity.layout import ParityLayout
from tk.parity.subject import Subject

ROW = re.compile(r"^\| (\w+) \| (.*?) \| (any two|any three) \|", re.MULTILINE)


def chosen(axis: ParityAxis, value: object) -> ParityLayout:
    """Returns a layout with a value of one axis, and of others what the value needs."""
    needs: dict[str, Any] = {"zero": 3, "dp": 4} if axis.key.startswith(("zero", "offload")) else {}
    needs |= {"offload_optimizer": "cpu"} if axis.key.startswith("offload") else {}
    needs |= {"tp": 2} if axis.name == "kv_heads" else {}
    needs |= {"cp": 2} if axis.name == "cp_mode" else {}
    needs |= {"pp": 2, "num_virtual_stages": 2} if value == "interleaved" else {}
    return ParityLayout.model_validate(needs | {axis.name: value})


@pytest.mark.parametrize("axis", AXES.values(), ids=lambda axis: axis.name)
def test_an_axis_names_a_field_a_key_and_axes_before_it(axis: ParityAxis, tmp_path: Path) -> None:
    before = list(AXES)[: list(AXES).index(axis.name)]
    assert {name for group in axis.checked_with for name in group} <= set(before)
    for rule in axis.rules:
        assert axis.name in rule.axes
        assert set(rule.axes) <= {*before, axis.name}
    subject = Subject.built_in(tmp_path, 4, "fp32")
    for value in axis.values:
        layout = chosen(axis, value)
        config: Any = subject.config(layout)
        for part in axis.key.split(".") if axis.key else ():
            config = getattr(config, part)
        assert not axis.key or config == value
        assert ParityLayout.model_validate(layout.to_json()) == layout
    words = {str(chosen(axis, value)) for value in axis.values}
    assert len(words) == len(axis.values), "the words of a layout show the value"


def test_values_that_vary_the_model_make_other_models(tmp_path: Path) -> None:
    subject = Subject.built_in(tmp_path, 4, "fp32")
    for axis in AXES.values():
        references = {subject.reference(chosen(axis, value)).model_dump_json() for value in axis.values}
        assert (len(references) == len(axis.values)) >= axis.of_model, axis.name
    assert not any(AXES[name].of_model for name in FOREIGN_AXES)


def test_the_page_lists_the_axes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training" / "parity.md").read_text()
    listed = {name: (values, strength) for name, values, strength in ROW.findall(text)}
    strengths = {2: "any two", 3: "any three"}
    expected = {
        axis.name: (", ".join(str(value) for value in axis.values), strengths[axis.strength]) for axis in AXES.values()
    }
    assert listed == expected
