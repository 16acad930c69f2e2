"""The .proto of the Open Inference Protocol: names, numbers and types are the published ones, and all is documented.

tests/real/test_triton_client.py compares them with those of a client that others have written.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from google.protobuf import descriptor_pb2

from tk.proto.open_inference import open_inference_pb2 as oip

PUBLISHED = Path(__file__).with_name("published.txt")
SOURCE = Path(oip.__file__).with_name("open_inference.proto")


def schema() -> descriptor_pb2.FileDescriptorProto:
    schema = descriptor_pb2.FileDescriptorProto()
    oip.DESCRIPTOR.CopyToProto(schema)
    return schema


def fields(messages: list[descriptor_pb2.DescriptorProto], path: str = "") -> Iterator[str]:
    """Yields a line for each field: its name, its number and its type."""
    kinds = descriptor_pb2.FieldDescriptorProto
    for message in messages:
        for field in message.field:
            label = "repeated " * (field.label == kinds.LABEL_REPEATED)
            kind = field.type_name or kinds.Type.Name(field.type).removeprefix("TYPE_").lower()
            yield f"{path}{message.name}.{field.name} = {field.number}: {label}{kind}"
        yield from fields(list(message.nested_type), f"{path}{message.name}.")


def test_names_numbers_and_types_are_the_published_ones() -> None:
    [service] = schema().service
    calls = [
        f"{service.name}.{call.name}({'stream ' * call.client_streaming}{call.input_type})"
        f" returns ({'stream ' * call.server_streaming}{call.output_type})"
        for call in service.method
    ]
    assert [schema().package, *calls, *fields(list(schema().message_type))] == PUBLISHED.read_text().splitlines()


def test_generated_code_has_the_fields_of_the_file() -> None:
    """Without the generator, which needs an environment of its own; tests/real/test_generated_code.py runs it."""
    text = re.sub(r"//[^\n]*|enum \w+ {[^}]*}", "", SOURCE.read_text())
    generated = [line for line in fields(list(schema().message_type)) if "Entry." not in line]
    written = re.findall(r"(\w+) = (\d+);", text)
    assert sorted(written) == sorted(
        (line.partition(" = ")[0].rpartition(".")[2], line.partition(" = ")[2].partition(":")[0]) for line in generated
    )


def test_everything_in_the_file_is_documented() -> None:
    lines = [line.strip() for line in SOURCE.read_text().splitlines()]
    described = re.compile(r".* = \d+;|(rpc|service|message|oneof) ")
    bare = [line for before, line in pairwise(lines) if described.match(line) and not before.startswith("//")]
    assert not bare
