"""Events are values with the names of the wire, and load neither torch nor grpc."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from tk.core.errors import InvalidRequest, TkError
from tk.infer.engine.request.events import (
    AdapterInfo,
    Delta,
    Failed,
    Finished,
    FinishReason,
    ModelInfo,
    Started,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tk.infer.engine.request.request import CacheOptions
from tk.proto.v1 import generation_pb2 as pb


@pytest.mark.parametrize("kind", [Started, Delta, Usage, Timing, TokenLogprob, TopLogprob, ModelInfo, AdapterInfo])
def test_an_event_has_the_fields_of_its_message(kind: type) -> None:
    message = pb.DESCRIPTOR.message_types_by_name[kind.__name__.replace("AdapterInfo", "Adapter")]
    assert {field.name for field in fields(kind)} == set(message.fields_by_name)


def test_a_finished_sample_has_one_field_for_two_of_the_message() -> None:
    message = pb.DESCRIPTOR.message_types_by_name["Finished"]
    names = {field.name for field in fields(Finished)}
    assert names - {"matched"} == set(message.fields_by_name) - {"stop", "stop_token_id"}
    assert [field.name for field in message.oneofs_by_name["matched"].fields] == ["stop", "stop_token_id"]


def test_reasons_to_finish_are_the_wires() -> None:
    assert {f"FINISH_REASON_{reason.name}" for reason in FinishReason} == set(pb.FinishReason.keys()) - {
        "FINISH_REASON_UNSPECIFIED"
    }
    assert all(reason.value == reason.name.lower() for reason in FinishReason)


def test_events_are_values() -> None:
    assert Delta(0, "a", (1,)) == Delta(0, "a", (1,), ())
    assert Delta(0, "a", (1,)) != Delta(1, "a", (1,))
    with pytest.raises(FrozenInstanceError):
        Delta(0, "a", (1,)).text = "b"  # type: ignore[misc]
    assert type(Failed().error) is TkError
    assert Failed().error is not Failed().error


def test_events_load_neither_torch_nor_grpc() -> None:
    code = "import sys, tk.infer.engine.request.events; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("field", "value"), [("salt", b"a"), ("salt", 1), ("salt", None), ("bypass", "no")])
def test_the_use_of_the_cache_has_types(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"cache\.{field} is {type(value).__name__} .*; it must be ") as error:
        CacheOptions(**{field: value})
    assert error.value.field == f"cache.{field}"
