"""The .proto: what has landed never changes, its names follow one style, and the generated code is that of the file."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor

from tk.proto.v1 import generation_pb2 as pb

LANDED = Path(__file__).with_name("landed.txt")
SOURCE = Path(pb.__file__).with_name("generation.proto")


def kinds() -> Iterator[Descriptor]:
    """Yields every message of the package; the entries of maps too."""
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        yield message
        yield from message.nested_types


def facts() -> list[str]:
    """Returns a line for each field, enum value and call, with all that a peer relies on."""
    lines = []
    for message in kinds():
        for field in message.fields:
            of = field.message_type or field.enum_type
            arm = field.containing_oneof
            words = [f"{message.full_name}.{field.name} = {field.number}: type {field.type}"]
            words += ["repeated"] * field.is_repeated + ["with presence"] * field.has_presence
            words += [of.full_name] if of else []
            words += [f"in {arm.name}"] if arm and not arm.name.startswith("_") else []
            lines.append(", ".join(words))
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        lines += [f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values]
    for service in pb.DESCRIPTOR.services_by_name.values():
        for call in service.methods:
            stream = "stream " * call.server_streaming
            lines.append(f"{call.full_name}({call.input_type.full_name}) returns {stream}{call.output_type.full_name}")
    return sorted(lines)


def test_what_has_landed_is_still_there() -> None:
    """An addition is a new line of landed.txt; to change or remove a line breaks clients that exist."""
    assert facts() == LANDED.read_text().splitlines()


def test_names_follow_one_style() -> None:
    for message in kinds():
        assert re.fullmatch(r"([A-Z][a-z]+)+", message.name)
        assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name) for field in message.fields)
    enums: list[EnumDescriptor] = list(pb.DESCRIPTOR.enum_types_by_name.values())
    for enum in enums:
        prefix = re.sub(r"(?<!^)([A-Z])", r"_\1", enum.name).upper()
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert enum.values[0].number == 0
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


def source_numbers() -> dict[str, dict[str, int]]:
    """Returns the numbers by name of each message and enum in the .proto."""
    found: dict[str, dict[str, int]] = {}
    text = re.sub(r"//[^\n]*", "", SOURCE.read_text())
    for head in re.finditer(r"\b(message|enum) (\w+) \{", text):
        depth, at = 1, head.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        body = text[head.end() : at]
        found[head[2]] = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+);", body)}
    return found


def test_generated_code_has_the_fields_of_the_file() -> None:
    """Without the generator, which needs an environment of its own; tests/real/test_generated_code.py runs it."""
    generated = {
        name: {field.name: field.number for field in message.fields}
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    for name, enum in pb.DESCRIPTOR.enum_types_by_name.items():
        generated[name] = {value.name: value.number for value in enum.values}
    assert source_numbers() == generated


def test_everything_in_the_file_is_documented() -> None:
    lines = [line.strip() for line in SOURCE.read_text().splitlines()]
    described = re.compile(r".* = \d+;|(rpc|service|enum) ")
    bare = [line for before, line in pairwise(lines) if described.match(line) and not before.startswith("//")]
    assert not bare
