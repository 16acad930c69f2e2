"""The messages of tk.v1 stay where they are converted: all else of inference knows requests and events."""

from pathlib import Path

from tk.tests.house.test_floors import dotted, imports

CONVERTERS = {
    "infer.client": "client connection outgoing wire",
    "infer.serve.grpc": "admin service",
}


def test_only_converters_know_the_wire(root: Path, sources: list[Path]) -> None:
    found = {
        dotted(path)
        for path in sources
        if path.parts[0] == "infer"
        for _, name in imports(path, (root / path).read_text())
        if name.startswith("proto.v1")
    }
    assert found == {f"{folder}.{name}" for folder, names in CONVERTERS.items() for name in names.split()}
