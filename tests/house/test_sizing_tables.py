"""The tables of docs/sizing.md are those that the planner gives today."""

import re

import pytest

from tk.model.config import ModelConfig
from tk.model.registry import count_parameters, decoder_spec
from tk.scripts.sizing_tables import PAGE, SHAPES, TABLES, markdown, shown

QUICK = frozenset({"cpu", "weights", "cache"})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix) for name in TABLES]
)
def test_the_page_has_the_planners_figures(name: str) -> None:
    assert shown(name, PAGE.read_text()) == markdown(TABLES[name]()), "run `make map`"


def test_the_page_has_all_tables_and_no_other() -> None:
    assert re.findall(r"<!-- table: (\S+) -->", PAGE.read_text()) == list(TABLES)
    with pytest.raises(ValueError, match="has no line <!-- table: states -->"):
        shown("states", "<!-- table: state -->\n")


@pytest.mark.parametrize("name", SHAPES)
def test_models_have_the_parameters_of_their_name(name: str) -> None:
    number, unit = name.split()
    expected = float(number) * {"M": 1e6, "B": 1e9}[unit]
    assert count_parameters(decoder_spec(ModelConfig(**SHAPES[name]))) == pytest.approx(expected, rel=0.04)


def test_the_example_of_the_page_multiplies_right() -> None:
    text = " ".join(PAGE.read_text().split())
    [found] = re.findall(r"need ([\d,]+) x ([\d,]+) x ([\d,]+) bytes = (\d+) GiB", text)
    conversations, tokens, size, whole = (int(number.replace(",", "")) for number in found)
    assert conversations * tokens * size == whole << 30
