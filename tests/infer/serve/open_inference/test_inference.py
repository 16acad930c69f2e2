"""The message of a request: both forms of its tensor, and every way in which it can be wrong."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.engine.grammar.compiler import MissingExtra
from tk.infer.serve.errors import UnknownModel
from tk.infer.serve.grpc.messages import read_message
from tk.infer.serve.open_inference.inference import check_version, named_as_given, read_inference
from tk.proto.open_inference import open_inference_pb2 as oip
from tk.tests.infer.serve.open_inference.conftest import asking, parameter

Change = Callable[[oip.ModelInferRequest], object]


def raw(*contents: bytes) -> oip.ModelInferRequest:
    request = asking("")
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.extend(contents)
    return request


def test_the_text_of_both_forms() -> None:
    plain = read_inference(asking("grün"))
    assert (plain.request.prompt, plain.is_raw) == ("grün", False)
    text = "grün".encode()
    packed = read_inference(raw(len(text).to_bytes(4, "little") + text))
    assert (packed.request.prompt, packed.is_raw) == ("grün", True)
    assert read_inference(raw(bytes(4))).request.prompt == ""


def test_names_and_options_are_those_of_the_message() -> None:
    message = asking("a", max_tokens=3, timeout=2_000_000)
    message.id, message.model_name, message.model_version = "mine", "llama", "7"
    message.outputs.add(name="finish_reason")
    inference = read_inference(message)
    assert (inference.request.request_id, inference.request.model, inference.version) == ("mine", "llama", "7")
    assert inference.request.params.max_new_tokens == 3
    assert (inference.outputs, inference.timeout) == (("finish_reason",), 2.0)


def test_all_tensors_are_answered_unless_the_caller_names_some() -> None:
    assert read_inference(asking("a")).outputs == ("text_output", "finish_reason")


def second_input(message: oip.ModelInferRequest) -> None:
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])


def no_contents(message: oip.ModelInferRequest) -> None:
    message.inputs[0].ClearField("contents")


def shared_memory(message: oip.ModelInferRequest) -> None:
    message.inputs[0].parameters["shared_memory_region"].CopyFrom(parameter("a"))


def twice(message: oip.ModelInferRequest) -> None:
    message.outputs.extend([oip.ModelInferRequest.InferRequestedOutputTensor(name="text_output")] * 2)


def classification(message: oip.ModelInferRequest) -> None:
    message.outputs.add(name="text_output").parameters["classification"].CopyFrom(parameter(1))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda message: message.ClearField("inputs"), "inputs"),
        (second_input, "inputs"),
        (lambda message: setattr(message.inputs[0], "name", "prompt"), "inputs[0].name"),
        (lambda message: setattr(message.inputs[0], "datatype", "FP32"), "inputs[0].datatype"),
        (lambda message: message.inputs[0].ClearField("shape"), "inputs[0].shape"),
        (lambda message: message.inputs[0].shape.extend([1, 1]), "inputs[0].shape"),
        (lambda message: message.inputs[0].shape.append(2), "inputs[0].shape"),
        (lambda message: message.inputs[0].shape.__setitem__(0, 2), "inputs[0].shape"),
        (lambda message: message.inputs[0].shape.__setitem__(0, -1), "inputs[0].shape"),
        (shared_memory, "inputs[0].parameters.shared_memory_region"),
        (no_contents, "inputs[0].contents.bytes_contents"),
        (
            lambda message: message.inputs[0].contents.bytes_contents.append(b"b"),
            "inputs[0].contents.bytes_contents",
        ),
        (lambda message: message.inputs[0].contents.int_contents.append(1), "inputs[0].contents.int_contents"),
        (lambda message: message.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff"), "inputs[0]"),
        (lambda message: message.raw_input_contents.append(b"\1\0\0\0a"), "inputs[0].contents"),
        (lambda message: message.outputs.add(name="logits"), "outputs[0].name"),
        (twice, "outputs[1].name"),
        (classification, "outputs[0].parameters.classification"),
        (lambda message: message.parameters["top"].CopyFrom(parameter(1)), "parameters.top"),
        (lambda message: message.parameters["timeout"].CopyFrom(parameter("soon")), "parameters.timeout"),
    ],
)
def test_what_is_wrong_is_refused_by_name(change: Change, field: str) -> None:
    message = asking("a")
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        read_inference(message)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} ")


@pytest.mark.parametrize(
    "contents",
    [
        (b"",),
        (b"abc",),
        (b"\2\0\0\0a",),
        (b"\1\0\0\0ab",),
        (b"\1\0\0\0a\1\0\0\0b",),
        (b"\0\0\0\1a",),
        (b"\xff\xff\xff\xff",),
        (b"\1\0\0\0\xff",),
        (b"\1\0\0\0a", b"\1\0\0\0b"),
    ],
)
def test_raw_contents_hold_exactly_one_text(contents: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_inference(raw(*contents))
    assert caught.value.field == "raw_input_contents"


def test_a_version_is_a_training_step() -> None:
    check_version("", 7)
    check_version("7", 7)
    for wrong in ("1", "07", "latest"):
        with pytest.raises(UnknownModel, match="ask for '7'"):
            check_version(wrong, 7)


@pytest.mark.parametrize(
    ("own", "text", "field", "shown"),
    [
        ("top_p", "top_p is 2; lower it.", "parameters.top_p", "parameters.top_p is 2; lower it."),
        ("max_new_tokens", "x", "parameters.max_tokens", "x"),
        ("prompt", "The prompt has no tokens.", "inputs[0]", "The prompt has no tokens."),
        ("request_id", "request_id is '!'.", "id", "id is '!'."),
        ("", "Several fields are wrong.", "", "Several fields are wrong."),
    ],
)
def test_errors_name_fields_as_the_caller_does(own: str, text: str, field: str, shown: str) -> None:
    with (
        pytest.raises(InvalidRequest) as caught,
        named_as_given({"max_new_tokens": "max_tokens"}),
    ):
        raise InvalidRequest(text, field=own)
    assert (caught.value.field, str(caught.value)) == (field, shown)


def test_a_renamed_error_keeps_its_status() -> None:
    missing = MissingExtra("regex needs the extra structured.", field="regex")
    with pytest.raises(MissingExtra, match=r"parameters\.regex needs") as caught, named_as_given({}):
        raise missing
    assert caught.value.grpc_status == "UNIMPLEMENTED"
    assert missing.field == "regex", "it may be raised again"


def test_mutated_messages_are_read_or_refused() -> None:
    seed = asking("grün", temperature=0.5, seed=7, stop='["a"]', logit_bias='{"5": 1}', timeout=9, ignore_eos=True)
    seed.outputs.add(name="text_output")
    random, verdicts = Random(7), Counter[str]()
    for message in (seed, raw(b"\1\0\0\0a")):
        for _ in range(500):
            mutated = bytearray(message.SerializeToString())
            for _ in range(random.randint(1, 3)):
                at = random.randrange(len(mutated))
                mutated[at : at + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
            try:
                read = read_message(oip.ModelInferRequest, bytes(mutated))
                assert isinstance(read, oip.ModelInferRequest)
                read_inference(read)
            except InvalidRequest as error:
                verdicts["damaged" if "damaged" in str(error) else error.field.partition(".")[0]] += 1
            else:
                verdicts["read"] += 1
    assert verdicts["read"] > 20
    assert {"damaged", "parameters", "inputs[0]", "raw_input_contents"} <= set(verdicts), verdicts
