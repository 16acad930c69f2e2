"""What a client like grpcurl asks, which learns the services by reflection: python reflection_session.py HOST:PORT

It runs in an environment without tk.
"""

import sys
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

GREEDY: dict[str, Any] = {
    "sampling": {"temperature": 0, "seed": 3},
    "stopping": {"max_new_tokens": 6, "ignore_eos": True},
}
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tk.v1.Generation/GetModelInfo", {}),
    ("tk.v1.Generation/Tokenize", {"text": "def main("}),
    ("tk.v1.Generation/Detokenize", {"ids": [65, 66, 67]}),
    ("tk.v1.Generation/GenerateOnce", {"text": "def main(", **GREEDY}),
    ("tk.v1.Generation/Generate", {"text": "def main(", **GREEDY}),
    ("tk.v1.Generation/Score", {"text": "def main(", "continuation_text": "):", "top": 2}),
    ("tk.v1.Generation/GenerateOnce", {"text": "a", "stopping": {"max_new_tokens": 10**6}}),
    ("tk.v1.Admin/CheckCache", {}),
    ("tk.v1.Admin/FlushPrefixCache", {}),
    ("tk.v1.Admin/Abort", {"request_id": "none"}),
    ("tk.v1.Admin/Reload", {"checkpoint": "/no/such/step-00000100"}),
    ("grpc.health.v1.Health/Check", {"service": "tk.v1.Generation"}),
    ("grpc.health.v1.Health/Check", {"service": "unknown"}),
    ("inference.GRPCInferenceService/ServerMetadata", {}),
    ("inference.GRPCInferenceService/ModelMetadata", {}),
)


def main(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        symbols = sorted({path.partition("/")[0] for path, _ in CALLS} | {"tk.v1.Sampling", "no.such.Name"})
        asked = [ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
        requests = iter([ServerReflectionRequest(list_services=""), *asked])
        pool, files = DescriptorPool(), dict[str, FileDescriptorProto]()
        for answer in ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=60):
            for content in answer.file_descriptor_response.file_descriptor_proto:
                files |= {(file := FileDescriptorProto.FromString(content)).name: file}
        for file in files.values():
            pool.Add(file)
        for path, values in CALLS:
            service, _, name = path.partition("/")
            method = pool.FindServiceByName(service).methods_by_name[name]
            request = json_format.ParseDict(values, GetMessageClass(method.input_type)())
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(f"/{path}", type(request).SerializeToString, GetMessageClass(method.output_type).FromString)
            with suppress(grpc.RpcError):  # it is in the record
                answer = call(request, timeout=60)
                if method.server_streaming:
                    list(answer)


if __name__ == "__main__":
    main(sys.argv[1])
