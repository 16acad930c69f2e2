"""Reflection in both versions, from which tools read the services, and the names that the log takes from schemas."""

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tk.infer.serve.call.request_log import RequestLog
from tk.infer.serve.grpc.admin import ADMINISTRATION
from tk.infer.serve.grpc.reflection import known_names
from tk.infer.serve.grpc.service import GENERATION
from tk.infer.serve.open_inference.service import OPEN_INFERENCE
from tk.infer.serve.openai.http_port import NAMES
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS

LOG = RequestLog(names=known_names((GENERATION, OPEN_INFERENCE, ADMINISTRATION)) | NAMES)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_and_describes_the_services(channel: grpc.Channel, version: str) -> None:
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [listed] = ask(iter([request]), timeout=WAIT_SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    both = {f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha")}
    ours = {"tk.v1.Generation", "tk.v1.Admin", "inference.GRPCInferenceService"}
    assert names == {*ours, "grpc.health.v1.Health", *both}

    requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in sorted(names)]
    for name, answer in zip(sorted(names), ask(iter(requests), timeout=WAIT_SECONDS), strict=True):
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(raw)
            for raw in answer.file_descriptor_response.file_descriptor_proto
        ]
        assert name in {f"{file.package}.{service.name}" for file in files for service in file.service}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Generate",
            "ModelStreamInfer",
            "Reload",
            "sampling.top_p",
            "stopping.stop",
            "cache.salt",
            "chat.messages[12]",
        ),
        *(
            "messages[3].content[0].type",
            "response_format.json_schema.schema",
            "max_completion_tokens",
            "stream_options",
        ),
        *("parameters.temperature", "inputs[0].contents.bytes_contents", "raw_input_contents", "outputs[1].name", "id"),
    ],
)
def test_names_of_the_wire_and_of_openai_are_shown(name: str) -> None:
    assert LOG.known(name) == name


@pytest.mark.parametrize(
    "name", ["", "secret", "sampling.secret", "parameters.secret", "messages[secret].role", "top_p secret", "n.secret"]
)
def test_names_that_a_caller_made_up_are_not(name: str) -> None:
    assert LOG.known(name) == ""
