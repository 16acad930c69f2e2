"""Sampling parameters: the limits of each, each refusal with the name of the wire's field."""

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tk
from tk.core.errors import InvalidRequest
from tk.infer.engine.request.sampling_params import OPTIONS, SamplingParams
from tk.proto.v1 import generation_pb2 as pb

VOCAB = 10


@pytest.mark.parametrize(
    ("field", "served", "refused"),
    [
        ("temperature", [0.0, 1e-9, 100.0], [-0.1, math.inf, math.nan, 10**400]),
        ("top_k", [0, 2**31], [-1, 10**400]),
        ("top_p", [1e-9, 1.0], [0.0, 1.1, math.nan]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.5, 2.0], [0.0, -1.0, math.inf]),
        ("presence_penalty", [-2.0, 2.0], [math.inf, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-math.inf]),
        ("seed", [None, 0, 2**64 - 1], [-1, 2**64, 10**400]),
        ("n", [1, 16], [0, 17, 10**400]),
        ("logit_bias", [{}, {0: 1.0, 9: -1.0}], [{10: 1.0}, {-1: 1.0}, {0: math.inf}, {0: 10**400}]),
        ("max_new_tokens", [None, 1], [0]),
        ("min_new_tokens", [0, 5], [-1]),
        ("stop", [(), ("x" * 256,), ("x",) * 16], [("",), ("x" * 257,), ("é" * 129,), ("x",) * 17]),
        ("stop_token_ids", [(), (0, 9), (9,) * 64], [(10,), (-1,), (9,) * 65]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
    ],
)
def test_each_field_has_its_range(field: str, served: list[Any], refused: list[Any]) -> None:
    for value in served:
        SamplingParams(**{field: value}).validate(VOCAB)
    for value in refused:
        with pytest.raises(InvalidRequest, match=rf"{field} is .*; it must be ") as error:
            SamplingParams(**{field: value}).validate(VOCAB)
        assert error.value.field == field


def test_the_least_number_of_tokens_is_at_most_the_largest() -> None:
    SamplingParams(min_new_tokens=4, max_new_tokens=4).validate(VOCAB)
    with pytest.raises(InvalidRequest, match=r"min_new_tokens is 5; it must be at most max_new_tokens = 4"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4).validate(VOCAB)


def test_a_large_vocabulary_has_at_most_1024_biases() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)).validate(5000)
    with pytest.raises(InvalidRequest, match="1025 entries; it must be at most 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)).validate(5000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("top_k", 1.5),
        ("top_p", None),
        ("repetition_penalty", [1.0]),
        ("n", 2.0),
        ("n", True),
        ("seed", "7"),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {"1": 2.0}),
        ("json_schema", {"type": "integer"}),
        ("max_new_tokens", "10"),
        ("min_new_tokens", None),
        ("stop", "end"),
        ("stop", (b"end",)),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("logprobs", False),
        ("include_stop", "no"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field} is {type(value).__name__} .*; it must be ") as error:
        SamplingParams(**{field: value})
    assert error.value.field == field


def test_every_field_is_an_option_that_the_wire_has_with_the_same_default() -> None:
    assert list(OPTIONS) == [field.name for field in fields(SamplingParams)]
    parts = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    on_the_wire = {
        (part, name) for part in ("sampling", "stopping", "output") for name in parts[part].message_type.fields_by_name
    }
    assert on_the_wire == {(each.part, name) for name, each in OPTIONS.items()}
    for name, each in OPTIONS.items():
        default = getattr(SamplingParams(), name)
        assert each.kind.accepts(default)
        assert default is None or each.allowed is None or each.allowed.has(default)


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_an_option_is_written_down_in_few_files(name: str) -> None:
    """Its field, its effect in numpy, in C and in Triton, its column in a step; the .proto apart."""
    root = Path(tk.__file__).parent
    files = [path for ending in ("py", "c", "h") for path in (root / "infer").rglob(f"*.{ending}")]
    naming = [str(path.relative_to(root)) for path in files if re.search(rf"\b{name}\b", path.read_text())]
    assert len(naming) <= 6, naming
