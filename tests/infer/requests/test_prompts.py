"""The arguments of `generate` and `stream`: those of a wrong type are refused with their name."""

from typing import Any

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.requests.prompts import as_params, check_options
from tk.infer.requests.sampling_params import SamplingParams


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [None], [{}], 3])
def test_params_are_one_or_a_list(params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^params is .*; it must be one SamplingParams, or a list of these"):
        as_params(params, 1)
    assert as_params([SamplingParams(n=2)], 1) == [SamplingParams(n=2)]


def test_options_of_one_prompt_are_not_dicts() -> None:
    with pytest.raises(InvalidRequest, match=r"^params is dict .*; it must be a SamplingParams"):
        check_options({"temperature": 0}, None)
    with pytest.raises(InvalidRequest, match=r"^cache is str 'tenant'; it must be a CacheOptions, or None") as error:
        check_options(SamplingParams(), "tenant")
    assert error.value.field == "cache"
