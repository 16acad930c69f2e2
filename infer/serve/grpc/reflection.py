"""gRPC reflection, v1alpha and v1, from which tools like grpcurl read the services.

grpcio-reflection has only v1alpha, and logs a traceback for each damaged message, so messages are read here. v1 is byte
for byte the same protocol under another package name, so the same servicer answers v1. Its schema, which reflection
shows too, is v1alpha's with the name changed. The Open Inference Protocol is described as this server states it,
whatever other statement of it the process has.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ....proto.open_inference import open_inference_pb2
from .messages import read_short_message
from .server import add_methods
from .status import answered

V1_SERVICE: Final = "grpc.reflection.v1.ServerReflection"
_METHOD: Final = "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Adds reflection to a server; it describes `services` (full names) and itself."""
    _register_v1_schema()
    servicer = reflection.aio.ReflectionServicer((*services, reflection.SERVICE_NAME, V1_SERVICE), pool=_Pools())

    async def answer(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with answered(context):
            requests = (read_short_message(reflection_pb2.ServerReflectionRequest, raw) async for raw in raws)
            async for response in servicer.ServerReflectionInfo(requests, context):
                yield response

    to_bytes = reflection_pb2.ServerReflectionResponse.SerializeToString
    handlers = {_METHOD: grpc.stream_stream_rpc_method_handler(answer, response_serializer=to_bytes)}
    for name in (reflection.SERVICE_NAME, V1_SERVICE):
        add_methods(server, name, handlers)


def known_names(services: Iterable[ServiceDescriptor]) -> frozenset[str]:
    """Returns the names of calls, and of fields in the files of services, which the log may have."""
    names = {_METHOD}
    for service in services:
        names |= {method.name for method in service.methods}
        names |= set(_field_names(service.file.message_types_by_name.values()))
    return frozenset(names)


def _field_names(messages: Iterable[Descriptor]) -> Iterator[str]:
    for message in messages:
        yield from (each.name for each in (*message.fields, *message.oneofs))
        yield from _field_names(message.nested_types)


class _Pools:
    """The descriptors of the pool of the Open Inference Protocol, and of the one that all libraries share."""

    def _find(self, method: str, name: str) -> Any:
        with suppress(KeyError):
            return getattr(open_inference_pb2.DESCRIPTOR.pool, method)(name)
        return getattr(descriptor_pool.Default(), method)(name)

    FindFileByName = partialmethod(_find, "FindFileByName")
    FindFileContainingSymbol = partialmethod(_find, "FindFileContainingSymbol")
    FindMessageTypeByName = partialmethod(_find, "FindMessageTypeByName")

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return message.file.pool.FindAllExtensions(message)


def _register_v1_schema() -> None:
    """Registers v1's schema with protobuf, unless another library has done so."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileContainingSymbol(V1_SERVICE)
    except KeyError:
        schema = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(schema)
        schema.ClearField("options")
        text = text_format.MessageToString(schema).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
