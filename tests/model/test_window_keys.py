"""The keys for sliding windows: Qwen's switch, and the type of every layer."""

from typing import Any

import pytest

from tk.model.config import ModelConfig
from tk.model.shape import FULL, SLIDING, ModelShape
from tk.model.window_keys import read_windows, usual_types, windows, write_switch
from tk.tests.model.tiny_llama import TINY_LLAMA

SHAPE = ModelShape(**TINY_LLAMA | {"num_hidden_layers": 3, "sliding_window": 8})
VALUES: dict[str, Any] = {"num_hidden_layers": 3, "sliding_window": 8}
MIXED = [FULL, SLIDING, FULL]


def test_layers_have_the_window_of_their_type() -> None:
    assert windows(SHAPE) == [8, 8, 8]
    assert windows(SHAPE.model_copy(update={"max_window_layers": 2})) == [None, None, 8]
    assert windows(SHAPE.model_copy(update={"layer_types": tuple(MIXED)})) == [None, 8, None]
    assert windows(SHAPE.model_copy(update={"sliding_window": None})) == [None, None, None]
    assert usual_types(3, 8, 1) == [FULL, SLIDING, SLIDING]


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True}, 8),
        ({}, 8),
    ],
)
def test_qwens_window_counts_only_with_its_switch(changes: dict[str, Any], window: int | None) -> None:
    assert read_windows(VALUES | changes, None, per_layer=True)["sliding_window"] == window
    assert write_switch(SHAPE.model_copy(update={"sliding_window": window})) == {"use_sliding_window": bool(window)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": [FULL] * 3}, [None] * 3),
        ({"layer_types": [FULL] * 3, "max_window_layers": 0}, [None] * 3),
        ({"layer_types": [SLIDING] * 3, "max_window_layers": 0}, [8] * 3),
        ({"layer_types": MIXED, "max_window_layers": 1}, [None, 8, None]),
        ({}, [8, None, 8]),
        ({"max_window_layers": 1}, [8, None, None]),
        ({"max_window_layers": 0}, [None] * 3),
    ],
)
def test_qwen2_moes_own_rule_counts_only_without_layer_types(
    changes: dict[str, Any], expected: list[int | None]
) -> None:
    config = {"model_type": "qwen2_moe", "vocab_size": 301, "num_hidden_layers": 3, "use_sliding_window": True}
    assert windows(ModelConfig.from_json(config | {"sliding_window": 8} | changes)) == expected


def test_layer_types_are_kept_only_if_they_say_more_than_the_other_keys() -> None:
    usual = read_windows(VALUES | {"max_window_layers": 1}, [FULL, SLIDING, SLIDING], per_layer=False)
    assert usual == {"sliding_window": 8, "max_window_layers": 1, "layer_types": None}
    mixed = read_windows(VALUES | {"max_window_layers": 1}, MIXED, per_layer=True)
    assert mixed == {"sliding_window": 8, "max_window_layers": None, "layer_types": MIXED}


@pytest.mark.parametrize(
    ("changes", "kinds", "message"),
    [
        ({"use_sliding_window": None}, None, "use_sliding_window = None must be true or false"),
        ({"max_window_layers": "1"}, None, "max_window_layers = '1' must be a number of layers"),
        ({"max_window_layers": -1}, None, "max_window_layers = -1 must be a number of layers"),
        ({}, SLIDING, "must be a list of 'full_attention' and 'sliding_attention'"),
        ({}, [SLIDING, SLIDING, "chunked_attention"], "must be a list of"),
        ({}, [SLIDING, SLIDING, []], "must be a list of"),
        ({}, [SLIDING], "layer_types has 1 entries, and num_hidden_layers = 3"),
        ({"sliding_window": None}, MIXED, "layer_types has 'sliding_attention', but sliding_window is not set"),
        ({"use_sliding_window": False}, MIXED, "or use_sliding_window is false"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes: dict[str, Any], kinds: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_windows(VALUES | changes, kinds, per_layer=True)


def test_layers_that_differ_are_refused_where_all_must_be_alike() -> None:
    for kinds in (MIXED, [FULL] * 3):
        with pytest.raises(ValueError, match=r"layer_types = .* whose layers all have sliding_window = 8"):
            read_windows(VALUES, kinds, per_layer=False)
    assert read_windows({"num_hidden_layers": 3}, [FULL] * 3, per_layer=False)["sliding_window"] is None
