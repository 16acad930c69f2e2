"""The tables of DeepSpeed's keys: each key is in one of them, and each key of tk that they name exists."""

from itertools import combinations

from tk.core.config import Section
from tk.train.config.deepspeed.keys import (
    DEFAULTS,
    DIRECT,
    FIXED,
    NEEDLESS,
    NOTED,
    REFUSED_SECTIONS,
    RULED,
    WITHOUT_SWITCH,
)
from tk.train.config.train_config import TrainConfig


def test_a_key_is_in_one_table() -> None:
    tables = {
        "direct": DIRECT.keys(),
        "ruled": RULED,
        "fixed": FIXED.keys(),
        "refused": REFUSED_SECTIONS.keys(),
        "noted": NOTED.keys(),
        "needless": NEEDLESS,
    }
    for (name, keys), (other, others) in combinations(tables.items(), 2):
        assert set(keys) & set(others) <= {"scheduler.params.last_batch_iteration"}, f"{name} and {other}"
    assert REFUSED_SECTIONS.keys() >= WITHOUT_SWITCH


def _section(name: str) -> type[Section]:
    kind = TrainConfig.model_fields[name].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, Section)
    return kind


def test_keys_of_tk_exist() -> None:
    named = [ours for ours, _ in DIRECT.values()] + list(DEFAULTS)
    for key in named:
        section, name = key.split(".")
        assert name in _section(section).model_fields, key


def test_defaults_differ_from_those_of_tk_and_are_of_keys_that_are_read() -> None:
    for key, (value, source) in DEFAULTS.items():
        section, name = key.split(".")
        assert source in DIRECT or source in RULED
        ours = getattr(_section(section)(), name)
        assert key in ("optimizer.lr", "optimizer.eps") or ours != (tuple(value) if isinstance(value, list) else value)
