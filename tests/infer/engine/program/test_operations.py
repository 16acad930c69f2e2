"""Programs as data: every operation reads buffers that an earlier one wrote, in every architecture."""

import dataclasses
from typing import Final, get_args

import pytest

from tk.infer.engine.program.lower import Program, lower
from tk.infer.engine.program.operations import (
    AttendToCache,
    Embed,
    Gate,
    Head,
    Multiply,
    Norm,
    Operation,
    Reduce,
    RotateAndAppend,
    Route,
    RunExperts,
    SampleTokens,
)
from tk.model.registry import architectures
from tk.tests.infer.engine.program.test_lower import spec_of

# The buffers that an operation reads and the one that it writes, as the table in operations.py says.
ROUTES: Final[dict[type[Operation], tuple[tuple[str, ...], str]]] = {
    Embed: ((), "hidden"),
    Norm: (("hidden",), "normed"),
    RotateAndAppend: (("qkv",), "query"),
    AttendToCache: (("query",), "attended"),
    Gate: (("inner",), "gated"),
    Route: (("normed",), "routing"),
    RunExperts: (("normed", "routing"), "partial"),
    Reduce: (("partial", "hidden"), "hidden"),
    Head: (("normed",), "logits"),
    SampleTokens: (("logits",), "tokens"),
}


def programs() -> list[Program]:
    """Returns a program of every architecture, and of one whose first layer has no experts."""
    mixed = {"mlp_only_layers": (0,), "num_hidden_layers": 2, "moe_intermediate_size": 16}
    return [*(lower(spec_of(name)) for name in sorted(architectures())), lower(spec_of("qwen3_moe", **mixed))]


def route(operation: Operation) -> tuple[tuple[str, ...], str]:
    """Returns the buffers that an operation reads, and the one that it writes."""
    return ((operation.source,), operation.target) if isinstance(operation, Multiply) else ROUTES[type(operation)]


@pytest.mark.parametrize("program", programs())
def test_a_buffer_is_written_before_it_is_read_and_nothing_is_written_in_vain(program: Program) -> None:
    unread: dict[str, Operation] = {}
    written: set[str] = set()
    for operation in program.operations:
        reads, writes = route(operation)
        assert set(reads) <= written, operation
        for name in reads:
            unread.pop(name, None)
        assert writes not in unread, f"{operation} overwrites the result of {unread.get(writes)}, which nothing read"
        unread[writes] = operation
        written.add(writes)
    assert set(unread) == {"tokens"}


def test_architectures_need_every_operation() -> None:
    used = {type(operation) for program in programs() for operation in program.operations}
    assert used == set(get_args(Operation)) == {Multiply, *ROUTES}


@pytest.mark.parametrize("program", programs())
def test_operations_are_values(program: Program) -> None:
    for operation in program.operations:
        assert dataclasses.replace(operation) == operation
        assert hash(dataclasses.replace(operation)) == hash(operation)
        for name in [field.name for field in dataclasses.fields(operation)][:1]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(operation, name, None)
