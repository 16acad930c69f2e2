"""The wings of inference: no import leads from the engine to a protocol, and it works where none can be imported.

Their modules are short, and the engine's classes small.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tk.tests.house.syntax import nodes
from tk.tests.house.test_floors import all_imports, dotted
from tk.tests.infer.serve.tiny_model import write_tiny_model

ENGINE = "tk.infer.engine"
PROTOCOLS = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google.protobuf", "h11", "starlette", "uvicorn")
MOST_LINES, MOST_FOLDERS, MOST_ATTRIBUTES = 300, 4, 12
FORBIDDEN = (*PROTOCOLS, "tk.proto", "tk.infer.serve", "tk.infer.client")


def is_below(name: str, tops: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{top}.") for top in tops)


def ways_out(texts: dict[Path, str]) -> list[str]:
    """Returns the imports that lead from the engine to a forbidden name, each with all modules on its way.

    What only a type checker imports counts. The packages above a module do not, as `tk.infer`, which loads its names
    lazily: that they keep to it is seen where the modules are imported.
    """
    imported = {f"tk.{dotted(path)}": sorted({name for _, name in all_imports(path, texts[path])}) for path in texts}
    ways = {module: module for module in imported if is_below(module, [ENGINE])}
    ahead, wrong = list(ways), []
    while ahead:
        here = ahead.pop()
        for name in imported[here]:
            if is_below(name, FORBIDDEN):
                wrong.append(f"{ways[here]} -> {name}")
                continue
            module = next((each for each in (name, name.rpartition(".")[0]) if each in imported), None)
            if module is not None and module not in ways:
                ways[module] = f"{ways[here]} -> {module}"
                ahead.append(module)
    return wrong


def test_no_import_leads_from_the_engine_to_a_protocol(root: Path, sources: list[Path]) -> None:
    assert ways_out({path: (root / path).read_text() for path in sources}) == []


def test_ways_out_are_found() -> None:
    texts = {
        Path("infer/engine/a.py"): "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ...core.b import B",
        Path("infer/engine/d.py"): "from ..serve.call import runner\nimport googleapis, grpclib",
        Path("infer/serve/call/runner.py"): "import h11",
        Path("core/b.py"): "def f():\n    from .c import C",
        Path("core/c.py"): "from google import protobuf\nimport grpc.aio",
    }
    assert sorted(ways_out(texts)) == [
        "tk.infer.engine.a -> tk.core.b -> tk.core.c -> google.protobuf",
        "tk.infer.engine.a -> tk.core.b -> tk.core.c -> grpc.aio",
        "tk.infer.engine.d -> tk.infer.serve.call.runner",
    ]


def test_messages_of_the_wire_stay_where_the_wire_is(root: Path, sources: list[Path]) -> None:
    wire = "tk.proto.v1"
    users = {
        path
        for path in sources
        if path.parts[0] == "infer"
        for _, name in all_imports(path, (root / path).read_text())
        if is_below(name, [wire])
    }
    assert users
    assert [str(path) for path in users if path.parts[1:-1] not in (("serve", "grpc"), ("client",))] == []


def test_one_module_makes_the_records_of_calls(root: Path, sources: list[Path]) -> None:
    makers = [str(path) for path in sources if re.search(r"\bRequestRecord\(", (root / path).read_text())]
    assert makers == ["infer/serve/call/request_log.py"]


def test_inference_is_not_deep_and_its_modules_are_short(root: Path, sources: list[Path]) -> None:
    inside = [path for path in sources if path.parts[0] == "infer"]
    assert [str(path) for path in inside if len(path.parts[1:-1]) > MOST_FOLDERS] == []
    assert [str(path) for path in inside if len((root / path).read_text().splitlines()) > MOST_LINES] == []


def attributes(node: ast.ClassDef) -> set[str]:
    """Returns the attributes of a class: its annotated fields, and those that its methods set of `self`."""
    found = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            found.add(each.attr)
    return found


def is_plain(node: ast.ClassDef) -> bool:
    """Returns whether a class is neither a frozen description nor a structure of C."""
    frozen = any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
    return not frozen and not any("Structure" in ast.unparse(base) for base in node.bases)


def large_classes(path: Path, text: str) -> list[str]:
    """Returns the plain classes of a module that have more than MOST_ATTRIBUTES attributes."""
    classes = [node for node in nodes(text) if isinstance(node, ast.ClassDef) and is_plain(node)]
    return [f"{path}: {node.name}" for node in classes if len(attributes(node)) > MOST_ATTRIBUTES]


def test_no_class_of_the_engine_has_many_attributes(root: Path, sources: list[Path]) -> None:
    inside = [path for path in sources if path.parts[:2] == ("infer", "engine")]
    assert [line for path in inside for line in large_classes(path, (root / path).read_text())] == []


def test_a_class_with_many_attributes_is_seen() -> None:
    names = [f"a{number}" for number in range(MOST_ATTRIBUTES)]
    fields = "".join(f"    {name}: int\n" for name in names)
    method = "    def f(self):\n        self.a0, (self.b, _) = 1, (2, 3)\n"
    assert large_classes(Path("x.py"), f"class A:\n{fields}") == []
    assert large_classes(Path("x.py"), f"class A:\n{fields}{method}") == ["x.py: A"]
    assert large_classes(Path("x.py"), f"@dataclass(frozen=True)\nclass A:\n{fields}{method}") == []
    assert large_classes(Path("x.py"), f"class A(ctypes.Structure):\n{fields}{method}") == []


# Python imports `sitecustomize` when it starts: in the workers too, which search the folders of their parent.
SITE = f"""
import sys

class NoProtocol:
    def find_spec(self, name, path=None, target=None):
        if any(f"{{name}}.".startswith(f"{{top}}.") for top in {PROTOCOLS}):
            raise ImportError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, NoProtocol())
"""
PROGRAM = """
import importlib, sys

checkpoint, *modules = sys.argv[1:]
for name in ("grpc", "google.protobuf"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    sys.exit(f"{name} can be imported")

from tk.infer import LLM, SamplingParams

with LLM(checkpoint, threads=1, kv_memory=1 << 20) as llm:
    print(len(llm.generate("abc", SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True))[0].token_ids))
for name in modules:
    importlib.import_module(name)
print(sorted(name for name in sys.modules if name.startswith(("tk.proto", "tk.infer.serve", "tk.infer.client"))))
"""


def test_the_engine_works_where_no_protocol_can_be_imported(tmp_path: Path, sources: list[Path]) -> None:
    checkpoint = str(write_tiny_model(tmp_path / "model"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)

    modules = [name for path in sources if is_below(name := f"tk.{dotted(path)}", [ENGINE])]
    if find_spec("triton") is None:
        modules = [name for name in modules if not is_below(name, [f"{ENGINE}.kernels.triton"])]
    generated = run("-c", PROGRAM, checkpoint, *modules)
    assert (generated.returncode, generated.stdout) == (0, "4\n[]\n"), generated.stderr
    command = ("generate", checkpoint, "abc", "--max-new-tokens", "4", "--temperature", "0", "--json")
    printed = run("-m", "tk", *command, "--threads", "1", "--kv-memory", "1MiB")
    assert (printed.returncode, '"finish_reason": "length"' in printed.stdout) == (0, True), printed.stderr
