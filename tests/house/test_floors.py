"""The rules of imports: down the floors only, without circles, and no torch in modules that do not compute.

Also, a public class name is taken once, with or without an underscore before it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tk.tests.house.syntax import nodes

FLOORS = {
    "core": 0,
    "parallel": 1,
    "checkpoint": 1,
    "proto": 1,
    "text": 1,
    "model": 2,
    "data": 2,
    "train": 3,
    "infer": 3,
    "parity": 4,
    "cli": 5,
}
# The floors of a room's own folders and modules.
SUB_FLOORS = {
    "checkpoint": {"files": 0, "format": 1, "read": 2, "run": 3, "save": 4, "convert": 5},
    "infer": {
        "constraints": 0,
        "kv_formats": 0,
        "options": 1,
        "requests": 2,
        "program": 3,
        "planning": 4,
        "scheduling": 4,
        "sampling": 5,
        "backends": 6,
        "workers": 7,
        "engine": 8,
        "api": 9,
        "observability": 9,
        "server": 10,
        "http": 11,
        "load_test": 10,
    },
    "train": {
        "config": 0,
        "state": 0,
        "health": 0,
        "pipeline": 0,
        "planning": 1,
        "records": 2,
        "zero": 3,
        "engine": 4,
        "saving": 5,
        "foreign": 6,
        "run": 7,
        "launch": 8,
    },
}
# The modules that compute. All other modules, policies and clients among them, work without a deep-learning stack.
COMPUTE: dict[str, str] = {
    "infer.backends.aten": "coded_weight experts hadamard interpreter kv_cache model_runner paged_attention pages "
    "prepare prepared_weights row_tiles",
    "model": "activation attention balance decoder experts init loading mlp norm peers placement recompute rope",
    "parallel": "collectives cross_entropy functions host layers linear link_factory local_link mesh point_to_point "
    "products row_blocks torch_dtypes wide_sums",
    "parity": "flat_values foreign gradients measure reference_values updates",
    "train.engine": "compiling evaluate loss nonfinite optimizer_step passes stages training_engine",
    "train.foreign": "accumulation blocks buffers checks construction construction_log disguise first_values "
    "join_job model model_engine on_meta options replay stored_weights take_over watch",
    "train.health": "flight_recorder",
    "train.launch": "rendezvous worker",
    "train.pipeline": "executor",
    "train.records": "metrics step_log step_profiler",
    "train.run": "inputs run_start trainer",
    "train.saving": "checkpointer replica_check save_in_flight saver snapshot",
    "train.zero": "absent adamw_rule agreement flat_buffers gradient_exchange gradient_sum outputs "
    "own_parameters parameter_gather random_rounding saved_parameters sharded_adamw square_sum "
    "trained_parameter written_values",
    "train.zero.states": "buffer disk_states host_transfer memory_states open_states state_file state_store",
}


def dotted(path: Path) -> str:
    """Returns the dotted name of a module: cli/main.py -> "cli.main", cli/__init__.py -> "cli", __init__.py -> ""."""
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


def room_of(name: str) -> str:
    return name.split(".")[0]


def imports(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, name below `tk`) for every import of tk's own modules, inside functions too."""
    package = ["tk", *path.parent.parts]
    for node in nodes(text):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name.removeprefix("tk.")) for name in names if name.split(".")[0] == "tk")


def broken_rules(path: Path, text: str) -> list[str]:
    """Returns a line for every import of a module that its floor forbids."""
    room = path.parts[0] if len(path.parts) > 1 else ""
    if not room:
        return []
    wrong = []
    for line, name in imports(path, text):
        other = room_of(name)
        if other == "__version__":
            continue
        if other == room:
            floors, here, there = SUB_FLOORS.get(room, {}), Path(path.parts[1]).stem, f"{name}.".split(".")[1]
            if here in floors and here != there and floors.get(there, 99) >= floors[here]:
                wrong.append(f"{path}:{line}: {room}/{here} must not import tk.{name}")
            continue
        if FLOORS.get(other, 99) >= FLOORS[room]:
            wrong.append(f"{path}:{line}: {room} (floor {FLOORS[room]}) must not import tk.{name}")
    return wrong


def test_imports_go_down_only(root: Path, sources: list[Path]) -> None:
    wrong = [line for path in sources for line in broken_rules(path, (root / path).read_text())]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_a_room_with_floors_has_one(sources: list[Path]) -> None:
    folders = {(path.parts[0], path.parts[1]) for path in sources if len(path.parts) > 2}
    assert not [f"{room}/{name}" for room, name in sorted(folders) if name not in SUB_FLOORS.get(room, {name: 0})]


def test_rooms_use_relative_imports(root: Path, sources: list[Path]) -> None:
    wrong = []
    for path in sources:
        for node in nodes((root / path).read_text()):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "tk":
                wrong.append(f"{path}:{node.lineno}: import tk's own rooms relatively")
    assert not wrong, "\n".join(wrong)


def import_graph(texts: dict[Path, str]) -> dict[str, set[str]]:
    """Returns the modules that each module imports, under TYPE_CHECKING and inside functions too."""
    modules = {dotted(path) for path in texts}
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        found = graph.setdefault(dotted(path), set())
        for _, name in imports(path, text):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            found |= {name} - {"", dotted(path)}
    return graph


def circles(graph: dict[str, set[str]]) -> set[str]:
    """Returns the sets of modules that import each other in a circle, each as its names in order."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph[ahead.pop()] - seen
            seen |= new
            ahead += new
        reached[start] = seen
    return {
        " ".join(sorted(other for other in seen if name in reached[other]))
        for name, seen in reached.items()
        if name in seen
    }


def taken_twice(texts: dict[Path, str]) -> list[str]:
    """Returns a line for every public class name that is defined again, be it as a private class."""
    places: dict[str, list[str]] = {}
    public = set()
    for path, text in texts.items():
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                places.setdefault(name, []).append(f"{path}:{node.lineno}")
                public |= {name} & {node.name}
    return [f"class {name} is defined at {' and '.join(places[name])}" for name in sorted(public) if places[name][1:]]


def test_no_modules_import_each_other_in_a_circle(root: Path, sources: list[Path]) -> None:
    assert not circles(import_graph({path: (root / path).read_text() for path in sources}))


def test_a_public_class_name_is_taken_once(root: Path, sources: list[Path]) -> None:
    assert not taken_twice({path: (root / path).read_text() for path in sources})


def test_circles_and_second_names_are_found() -> None:
    texts = {
        Path("core/a.py"): "if TYPE_CHECKING:\n    from .b import B\nclass A: ...",
        Path("core/b.py"): "from . import c\nclass B: ...\nclass _Own: ...",
        Path("core/c.py"): "def f():\n    from .a import A\nclass _Own: ...\nclass _A: ...",
        Path("core/d.py"): "from .a import A",
    }
    assert circles(import_graph(texts)) == {"core.a core.b core.c"}
    assert taken_twice(texts) == ["class A is defined at core/a.py:3 and core/c.py:4"]


def test_the_rules_find_broken_imports() -> None:
    up = broken_rules(Path("core/box.py"), "from ..model import Llama")
    beside = broken_rules(Path("train/loop.py"), "def f():\n    from ..infer.engine import Engine")
    spelled_out = broken_rules(Path("parallel/mesh.py"), "import tk.checkpoint.format.manifest")
    sideways_package = broken_rules(Path("infer/server/service.py"), "from ... import train")
    assert [len(wrong) for wrong in (up, beside, spelled_out, sideways_package)] == [1, 1, 1, 1]
    assert "train (floor 3) must not import tk.infer.engine.Engine" in beside[0]
    fine = "from . import unit\nfrom ..core import errors\nfrom .. import __version__\nimport torch"
    assert broken_rules(Path("data/loop.py"), fine) == []
    inside = broken_rules(Path("checkpoint/read/locate.py"), "from ..run import run_folder\nfrom .. import Checkpoint")
    assert len(inside) == 2
    assert "checkpoint/read must not import tk.checkpoint.run.run_folder" in inside[0]
    assert broken_rules(Path("checkpoint/read/locate.py"), "from ..files import storage\nfrom . import foreign") == []
    [same_floor] = broken_rules(Path("train/health/stop.py"), "from ..state.progress import TrainState")
    assert "train/health must not import tk.train.state.progress.TrainState" in same_floor


IMPORT_ALL = """
import importlib, sys, traceback

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("torch must not be imported here")

sys.meta_path.insert(0, NoTorch())
failed = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        failed += 1
        print(f"--- importing {name}", traceback.format_exc(limit=-4), sep="\\n")
sys.exit(failed > 0)
"""


def test_modules_that_do_not_compute_load_no_torch(sources: list[Path]) -> None:
    modules = {dotted(path) for path in sources} - {"__main__"}
    compute = {f"{folder}.{name}" for folder, names in COMPUTE.items() for name in names.split()}
    assert compute <= modules
    light = sorted(f"tk.{name}".rstrip(".") for name in modules - compute)
    assert {"tk", "tk.core.errors", "tk.checkpoint.read.reader", "tk.cli.main", "tk.infer.api.client"} <= set(light)
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *light], capture_output=True, text=True)
    assert run.returncode == 0, f"a module that computes belongs into COMPUTE\n{run.stdout}{run.stderr}"
