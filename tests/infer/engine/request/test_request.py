"""Requests: their names, options and tokens."""

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.engine.request.prompts import GivenPrompt
from tk.infer.engine.request.request import CacheOptions, Request, as_request, as_requests, tokenized
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.tests.infer.engine.request.test_prompts import Letters


def test_requests_have_names_of_their_own() -> None:
    params, cache = SamplingParams(seed=3), CacheOptions(salt="x")
    requests = [tokenized(as_request("a", params, each), Letters()) for each in (cache, None)]
    assert [request.cache for request in requests] == [cache, CacheOptions()]
    assert [(request.prompt, request.params) for request in requests] == [((0, 97), params)] * 2
    assert requests[0].request_id != requests[1].request_id


def test_options_of_one_prompt_are_not_dicts() -> None:
    with pytest.raises(InvalidRequest, match=r"^params is dict .*; it must be a SamplingParams"):
        as_request("a", {"temperature": 0}, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^cache is str 'tenant'; it must be a CacheOptions, or None") as error:
        as_request("a", None, "tenant")  # type: ignore[arg-type]
    assert error.value.field == "cache"


def test_each_prompt_has_a_request() -> None:
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    prompts: list[GivenPrompt] = ["a", [5, 6]]
    requests = as_requests(prompts, [one, two], None)
    assert [(request.prompt, request.params) for request in requests] == [("a", one), ((5, 6), two)]
    assert as_requests([], None, None) == []


def test_an_engine_takes_token_ids_alone() -> None:
    assert Request((1, 2), SamplingParams()).token_ids == (1, 2)
    with pytest.raises(InvalidRequest, match="no tuple of token ids") as error:
        _ = Request("text", SamplingParams()).token_ids
    assert error.value.field == "prompt"
