"""Parameters: every option under its name, values in every type that a sender may have, refusals by name."""

import json
import struct
from dataclasses import replace
from typing import Any

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.engine.grammar.compiler import MAX_BYTES
from tk.infer.engine.request.sampling_params import OPTIONS, SamplingParams
from tk.infer.serve.open_inference.parameters import MAX_JSON, read_parameters, read_timeout
from tk.proto.open_inference import open_inference_pb2 as oip
from tk.tests.infer.every_option import EVERY_OPTION
from tk.tests.infer.serve.open_inference.conftest import parameter


def read(**values: Any) -> SamplingParams:
    return read_parameters({name: parameter(value) for name, value in values.items()})[0]


def refusal(**values: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**values)
    return caught.value


def test_every_option_but_log_probabilities_has_a_parameter() -> None:
    expected = replace(EVERY_OPTION, logprobs=None, prompt_logprobs=None)
    options = set(OPTIONS) - {"logprobs", "prompt_logprobs", "json_schema", "regex", "grammar"}
    values = {name: getattr(expected, name) for name in options}
    texts = {name: value if isinstance(value, int | float) else json.dumps(value) for name, value in values.items()}
    assert read(**texts) == expected
    assert len(texts) > 12


def test_nothing_is_set_that_was_not_given() -> None:
    assert read() == SamplingParams()


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": "0.5"}, "temperature", 0.5),
        ({"temperature": 0.1}, "temperature", struct.unpack("f", struct.pack("f", 0.1))[0]),
        ({"top_k": "7"}, "top_k", 7),
        ({"top_k": "7.0"}, "top_k", 7),
        ({"top_k": 7.0}, "top_k", 7),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"max_tokens": 9}, "max_new_tokens", 9),
        ({"max_new_tokens": 9}, "max_new_tokens", 9),
        ({"min_tokens": 2}, "min_new_tokens", 2),
        ({"stop": "\n\n"}, "stop", ("\n\n",)),
        ({"stop": '["a", "é"]'}, "stop", ("a", "é")),
        ({"stop": '["a"'}, "stop", ('["a"',)),
        ({"stop": "7"}, "stop", ("7",)),
        ({"stop_token_ids": "[3, 4]"}, "stop_token_ids", (3, 4)),
        ({"logit_bias": '{"5": -1.5}'}, "logit_bias", {5: -1.5}),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"triton_enable_empty_final_response": True}, "ignore_eos", False),
    ],
)
def test_values_in_the_types_that_senders_have(values: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(read(**values), field) == expected


@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ({"temprature": 1.0}, "temprature", "is unknown"),
        ({"logprobs": 1}, "logprobs", "is unknown"),
        ({"priority": 1}, "priority", "is unknown"),
        ({"temperature": "warm"}, "temperature", "'warm'; it must be a finite number"),
        ({"temperature": True}, "temperature", "True; it must be a finite number"),
        ({"temperature": float("nan")}, "temperature", "a finite number"),
        ({"temperature": "-Infinity"}, "temperature", "a finite number"),
        ({"temperature": 1e39}, "temperature", "a finite number"),
        ({"temperature": "9" * 4000}, "temperature", "a finite number"),
        ({"top_k": "1e400"}, "top_k", "an integer"),
        ({"stop_token_ids": "[true]"}, "stop_token_ids", "a JSON list of token ids"),
        ({"stop_token_ids": "[null]"}, "stop_token_ids", "a JSON list of token ids"),
        ({"logit_bias": '{"5": NaN}'}, "logit_bias", "a JSON object"),
        ({"top_k": -1}, "top_k", "an integer from 0 to 4294967295"),
        ({"top_k": 1.5}, "top_k", "an integer"),
        ({"n": 2**32}, "n", "an integer"),
        ({"seed": -1}, "seed", "an integer from 0 to 18446744073709551615"),
        ({"seed": "9" * 5000}, "seed", "an integer"),
        ({"logit_bias": '{"5": ' + "9" * 5000 + "}"}, "logit_bias", "a JSON object"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"ignore_eos": "true"}, "ignore_eos", "true or false"),
        ({"regex": 5}, "regex", "a text"),
        ({"stop": 5}, "stop", "a text, or a JSON list of texts"),
        ({"stop": "[5]"}, "stop", "a JSON list of texts"),
        ({"stop": '["\\ud800"]'}, "stop", "a JSON list of texts"),
        ({"stop": json.dumps(["a" * MAX_JSON])}, "stop", "of at most 65536"),
        ({"stop": "a" * (MAX_JSON + 1)}, "stop", "of at most 65536"),
        ({"stop": json.dumps(["a"] * 1025)}, "stop", "1025 entries"),
        ({"regex": "a" * (MAX_BYTES + 1)}, "regex", "of at most 262144"),
        ({"logit_bias": json.dumps(dict.fromkeys(range(1025), 1))}, "logit_bias", "1025 entries"),
        ({"stop_token_ids": 5}, "stop_token_ids", "a JSON list of token ids"),
        ({"stop_token_ids": "null"}, "stop_token_ids", "a JSON list of token ids"),
        ({"stop_token_ids": "[-1]"}, "stop_token_ids", "a JSON list of token ids"),
        ({"stop_token_ids": "[" * 60_000}, "stop_token_ids", "a JSON list of token ids"),
        ({"logit_bias": '{"a": 1}'}, "logit_bias", "a JSON object"),
        ({"logit_bias": "[1]"}, "logit_bias", "a JSON object"),
        ({"max_tokens": 5, "max_new_tokens": 5}, "max_tokens", "set beside max_new_tokens"),
        ({"regex": "a", "json_schema": "{}"}, "regex", "set beside json_schema"),
    ],
)
def test_refusals_name_the_parameter(values: dict[str, Any], name: str, text: str) -> None:
    error = refusal(**values)
    assert error.field == f"parameters.{name}"
    assert str(error).startswith(f"parameters.{name} is ")
    assert text in str(error)
    assert len(str(error)) < 300


def test_a_parameter_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"parameters\.top_p is without a value"):
        read_parameters({"top_p": oip.InferParameter()})


def test_fields_are_found_under_the_names_that_the_caller_used() -> None:
    _, names = read_parameters({"max_tokens": parameter(3), "top_p": parameter(0.5)})
    assert names == {"max_new_tokens": "max_tokens", "top_p": "top_p"}


def test_the_timeout_is_in_microseconds() -> None:
    assert read_timeout({}) is None
    assert read_timeout({"timeout": parameter(0)}) is None
    assert read_timeout({"timeout": parameter(2_500_000)}) == 2.5
    assert read_timeout({"timeout": parameter("2500000")}) == 2.5
    for wrong in (-1, 1.5, True, "soon", "", "9" * 30, 2**63):
        with pytest.raises(InvalidRequest, match=r"parameters\.timeout is .* microseconds"):
            read_timeout({"timeout": parameter(wrong)})
