"""The order in which keys of rotary embedding count, and the embeddings that are refused by name."""

from typing import Any

import pytest

from tk.model.rope_keys import lost_theta, read_rope, refuse_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXT = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(data: dict[str, Any]) -> dict[str, Any]:
    return read_rope(data, 1e4, 64)


@pytest.mark.parametrize(
    ("data", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 7e5}}, 7e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7e5}}, 7e5),
        ({"rope_parameters": {"rope_theta": 7e5}, "rope_scaling": LLAMA3}, 1e4),
        ({"rope_parameters": {"rope_theta": 7e5}, "rope_scaling": LLAMA3 | {"rope_theta": 6e5}}, 6e5),
        ({"rope_parameters": {"rope_theta": 7e5}, "rope_scaling": LLAMA3, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 7e5}, "rope_scaling": {}}, 7e5),
    ],
)
def test_theta_is_that_of_the_object_that_counts(data: dict[str, Any], theta: float) -> None:
    assert read(data)["rope_theta"] == theta


@pytest.mark.parametrize(
    ("data", "context"),
    [
        ({"rope_scaling": LLAMA3}, 64),
        ({"rope_scaling": LLAMA3 | {CONTEXT: 16}}, 16),
        ({"rope_scaling": LLAMA3 | {CONTEXT: 16}, CONTEXT: 32}, 32),
        ({"rope_parameters": LLAMA3 | {CONTEXT: 8}, "rope_scaling": LLAMA3 | {CONTEXT: 16}}, 16),
        ({"rope_parameters": {"type": "llama3", **LLAMA3}}, 64),
    ],
)
def test_scaling_is_that_of_the_object_that_counts(data: dict[str, Any], context: int) -> None:
    assert read(data)["rope_scaling"] == LLAMA3 | {CONTEXT: context}
    assert read({"rope_scaling": {"type": "llama3"} | {key: LLAMA3[key] for key in LLAMA3 if key != "rope_type"}})


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({}, {CONTEXT: 64}),
        ({CONTEXT: 16, "mscale": 1.0, "mscale_all_dim": 0.5}, {CONTEXT: 16, "mscale": 1.0, "mscale_all_dim": 0.5}),
        ({"beta_fast": 16, "beta_slow": None, "attention_factor": None}, {CONTEXT: 64, "beta_fast": 16}),
        ({"attention_factor": 1.5, "truncate": False}, {CONTEXT: 64, "attention_factor": 1.5, "truncate": False}),
        ({"factor": None, CONTEXT: 32}, {CONTEXT: 32, "factor": 2.0}),
        ({"low_freq_factor": 1.0, "short_factor": [1.0]}, {CONTEXT: 64}),
    ],
)
def test_yarn_has_its_own_keys(keys: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, kind in (("rope_parameters", "rope_type"), ("rope_scaling", "type")):
        found = read({name: {kind: "yarn", "factor": 4.0, **keys}})
        assert found["rope_scaling"] == YARN | fields


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rope_scaling": 5}, "rope_scaling must be an object, not 5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: rope_type = 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "supported are 'default', 'linear', 'llama3', 'yarn'"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling: rope_type = \['yarn'\] is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing, which rope_type = 'linear' needs"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing, which rope_type = 'yarn' needs"),
        ({"rope_scaling": YARN | {CONTEXT: None}}, f"{CONTEXT} must not be null"),
        ({"rope_parameters": {"rope_type": None}}, "rope_parameters: rope_type = None is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters has an object for 'full_att"),
        ({"rope_theta": None}, "rope_theta must not be null; a file without it has 10000"),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 5e5}, "rope_theta must not be null"),
        ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters: partial_rotary_factor = 0.25"),
        ({"rope_parameters": {"partial_rotary_factor": None}}, "rope_parameters: partial_rotary_factor = None"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters: factor is missing"),
        ({"rope_scaling": LLAMA3, CONTEXT: None}, f"{CONTEXT} must not be null"),
    ],
)
def test_an_embedding_that_tk_lacks_is_refused_by_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(data)


def test_neutral_keys_and_those_without_an_object_change_nothing() -> None:
    plain = {"rope_theta": 1e4, "rope_scaling": None}
    assert read({"partial_rotary_factor": None, CONTEXT: 8, "rope_scaling": []}) == plain
    assert read({"partial_rotary_factor": 1.0}) == plain


def test_learned_positions_are_not_rotated() -> None:
    refuse_rope({"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": {}})
    with pytest.raises(ValueError, match=r"rope_scaling = .* the positions of this architecture are learned"):
        refuse_rope({"rope_scaling": LLAMA3})


def test_a_theta_that_an_edit_loses_is_said() -> None:
    lost = {"rope_parameters": {"rope_theta": 7e5}, "rope_scaling": LLAMA3}
    assert "its rope_theta = 700000.0 with it: the model has rope_theta = 10000.0" in lost_theta(lost, 1e4)
    for kept in (lost | {"rope_theta": 7e5}, {"rope_scaling": LLAMA3}, {"rope_parameters": {"rope_theta": 7e5}}, {}):
        assert lost_theta(kept, 1e4) == ""
    assert lost_theta({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA3}, 1e4) == ""
