"""The calls of inference.GRPCInferenceService on a server with a scripted engine."""

from typing import Any

import grpc
import pytest

from tk.infer.serve.open_inference.service import OPEN_INFERENCE
from tk.proto.open_inference import open_inference_pb2 as oip

WAIT_SECONDS = 20.0


class Calls:
    """The calls by name, as a client's library has them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        method = OPEN_INFERENCE.methods_by_name[name]
        make = self._channel.stream_stream if method.client_streaming else self._channel.unary_unary
        return make(
            f"/{OPEN_INFERENCE.full_name}/{name}",
            request_serializer=getattr(oip, method.input_type.name).SerializeToString,
            response_deserializer=getattr(oip, method.output_type.name).FromString,
        )


def parameter(value: bool | int | float | str) -> oip.InferParameter:
    """A value in the type that tritonclient sends it in."""
    match value:
        case bool():
            return oip.InferParameter(bool_param=value)
        case int() if value >= 2**63:
            return oip.InferParameter(uint64_param=value)
        case int():
            return oip.InferParameter(int64_param=value)
        case float():
            return oip.InferParameter(double_param=value)
    return oip.InferParameter(string_param=value)


def asking(text: str, **parameters: bool | int | float | str) -> oip.ModelInferRequest:
    """A request for a continuation."""
    request = oip.ModelInferRequest(parameters={name: parameter(value) for name, value in parameters.items()})
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    return request


def texts(answer: oip.ModelInferResponse, name: str = "text_output") -> list[str]:
    """The elements of a tensor that is not raw."""
    [tensor] = [tensor for tensor in answer.outputs if tensor.name == name]
    elements = [element.decode() for element in tensor.contents.bytes_contents]
    assert list(tensor.shape) == [len(elements)]
    return elements


@pytest.fixture
def calls(channel: grpc.Channel) -> Calls:
    return Calls(channel)
