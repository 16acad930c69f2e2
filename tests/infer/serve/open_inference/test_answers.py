"""Answers: the tensors of whole ones and of pieces, in both forms, and the totals."""

import struct
from dataclasses import replace

import pytest

from tk.infer.engine.request.completion import CompletionBuilder
from tk.infer.engine.request.events import FinishReason, SentEvent, Started
from tk.infer.serve.errors import UnknownModel
from tk.infer.serve.open_inference.answers import StreamedAnswer, config_of, metadata_of, whole_answer
from tk.infer.serve.open_inference.inference import read_inference
from tk.proto.open_inference import open_inference_pb2 as oip
from tk.tests.infer.serve.fake_engine import INFO, delta, finished
from tk.tests.infer.serve.open_inference.conftest import asking, texts

EVENTS: tuple[SentEvent, ...] = (
    Started("mine", prompt_tokens=4, cached_tokens=0, seed=2**64 - 1, step=7),
    delta("grü", 1),
    delta("ab", 0),
    replace(delta("x", 0), text=""),
    finished(0, FinishReason.EOS),
    delta("n", 1),
    finished(1),
)


def values(answer: oip.ModelInferResponse) -> dict[str, object]:
    return {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in answer.parameters.items()}


def answer_to(message: oip.ModelInferRequest) -> oip.ModelInferResponse:
    builder = CompletionBuilder()
    for event in EVENTS:
        builder.add(event)
    return whole_answer(read_inference(message), builder.completion(), "fake")


def test_a_whole_answer_has_an_element_for_each_sample() -> None:
    answer = answer_to(asking("a", n=2))
    assert (answer.model_name, answer.model_version, answer.id) == ("fake", "7", "mine")
    assert texts(answer) == ["ab", "grün"]
    assert texts(answer, "finish_reason") == ["stop", "length"]
    totals = {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 6, "seed": 2**64 - 1}
    assert values(answer) == totals


def test_an_answer_is_raw_where_the_request_was() -> None:
    message = asking("a", n=2)
    message.inputs[0].ClearField("contents")
    message.raw_input_contents.append(b"\1\0\0\0a")
    answer = answer_to(message)
    text = "grün".encode()
    assert answer.raw_output_contents[0] == struct.pack("<I2sI5s", 2, b"ab", 5, text)
    assert [tensor.HasField("contents") for tensor in answer.outputs] == [False, False]
    assert [list(tensor.shape) for tensor in answer.outputs] == [[2], [2]]


def test_an_answer_has_the_tensors_that_were_asked_for_in_that_order() -> None:
    message = asking("a")
    for name in ("finish_reason", "text_output"):
        message.outputs.add(name=name)
    assert [tensor.name for tensor in answer_to(message).outputs] == ["finish_reason", "text_output"]
    del message.outputs[0]
    assert [tensor.name for tensor in answer_to(message).outputs] == ["text_output"]


def test_pieces_joined_are_the_whole_answer() -> None:
    message = asking("a", n=2)
    streamed = StreamedAnswer(read_inference(message), "fake")
    pieces = [piece for event in EVENTS if (piece := streamed.piece(event)) is not None]
    whole = answer_to(message)
    for name in ("text_output", "finish_reason"):
        columns = zip(*(texts(piece, name) for piece in pieces), strict=True)
        assert ["".join(column) for column in columns] == texts(whole, name)
    assert len(pieces) == 5, "no message for the start, nor for a token without text"
    assert {(piece.model_name, piece.model_version, piece.id) for piece in pieces} == {("fake", "7", "mine")}
    assert [values(piece) for piece in pieces[:-1]] == [{"triton_final_response": False}] * 4
    assert values(pieces[-1]) == {"triton_final_response": True} | values(whole)


def test_weights_that_changed_before_the_start_are_no_answer_to_a_version() -> None:
    message = asking("a")
    message.model_version = "6"
    with pytest.raises(UnknownModel):
        answer_to(message)
    with pytest.raises(UnknownModel):
        StreamedAnswer(read_inference(message), "fake").piece(EVENTS[0])


def test_a_tensor_with_a_batch_dimension_has_an_answer_with_one() -> None:
    message = asking("a", n=2)
    message.inputs[0].shape.append(1)
    assert [list(tensor.shape) for tensor in answer_to(message).outputs] == [[1, 2], [1, 2]]


def test_the_configuration_describes_the_tensors() -> None:
    config = config_of(INFO).config
    assert (config.name, config.platform, config.backend, config.max_batch_size) == ("fake", "tk_safetensors", "tk", 0)
    assert config.model_transaction_policy.decoupled
    described = [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in (*config.input, *config.output)]
    text = oip.TYPE_STRING
    assert described == [("text_input", text, [1]), ("text_output", text, [-1]), ("finish_reason", text, [-1])]


def test_the_metadata_describe_the_tensors() -> None:
    found = metadata_of(INFO)
    assert (found.name, list(found.versions), found.platform) == ("fake", ["7"], "tk_safetensors")
    described = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in (*found.inputs, *found.outputs)]
    assert described == [
        ("text_input", "BYTES", [1]),
        ("text_output", "BYTES", [-1]),
        ("finish_reason", "BYTES", [-1]),
    ]
