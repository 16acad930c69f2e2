"""The table of formats: names, sizes, and their share of bf16's."""

import pytest

from tk.core.dtypes import COMPUTE_NAMES
from tk.core.errors import ConfigError
from tk.infer.engine.kv_formats import KV_DTYPES, KV_FORMATS, hadamard_size, kv_format


def test_the_names_are_those_of_the_command_line() -> None:
    assert (*COMPUTE_NAMES, "fp8", "int8", "int4", "k8v4") == KV_DTYPES
    assert tuple(kv_format(name) for name in KV_DTYPES) == KV_FORMATS
    with pytest.raises(ConfigError, match="Unknown KV dtype 'int3'; use one of fp32, "):
        kv_format("int3")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("name", "most"), [("fp8", 0.5), ("int8", 0.54), ("int4", 0.32), ("k8v4", 0.43)])
def test_a_token_takes_the_promised_part_of_bf16(name: str, most: float, head_dim: int) -> None:
    assert kv_format(name).num_bytes(head_dim) <= most * kv_format("bf16").num_bytes(head_dim)


def test_blocks_of_the_transform_divide_the_head() -> None:
    assert [hadamard_size(dim) for dim in (1, 24, 64, 80, 96, 128)] == [1, 8, 64, 16, 32, 128]
