"""The engine knows no protocol: no way of imports leads from it to one, and it works where none can be imported."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tk.tests.house.test_floors import all_imports, dotted
from tk.tests.infer.serve.tiny_model import write_tiny_model

ENGINE = "tk.infer.engine"
PROTOCOLS = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google.protobuf", "h11", "starlette", "uvicorn")
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
    generated = run("-c", PROGRAM, checkpoint, *modules)
    assert (generated.returncode, generated.stdout) == (0, "4\n[]\n"), generated.stderr
    command = ("generate", checkpoint, "abc", "--max-new-tokens", "4", "--temperature", "0", "--json")
    printed = run("-m", "tk", *command, "--threads", "1", "--kv-memory", "1MiB")
    assert (printed.returncode, '"finish_reason": "length"' in printed.stdout) == (0, True), printed.stderr
