"""The rules of imports: down the floors only, without circles, and no torch in modules that do not compute.

Also, a public class name is taken once, with or without an underscore before it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tk.tests.house.syntax import nodes

# The floors of each folder's own folders, and of the modules beside them that they import. A module without a floor
# stands above all that have one.
FLOORS: dict[str, dict[str, int]] = {
    "": {
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
    },
    "checkpoint": {"files": 0, "format": 1, "read": 2, "run": 3, "save": 4, "convert": 5},
    "core": {"cores": 0, "cpu": 0, "errors": 0, "extras": 0, "process": 0, "native": 1},
    "infer": {"engine": 0, "client": 1, "serve": 2},
    "infer/client": {
        "wire": 0,
        "chat_wire": 0,
        "reached": 0,
        "outgoing": 1,
        "connection": 1,
        "client": 2,
        "adapters": 2,
        "load_test": 3,
    },
    "infer/engine": {
        "grammar": 0,
        "job": 0,
        "kv_formats": 0,
        "options": 1,
        "request": 2,
        "program": 3,
        "step": 3,
        "kernels": 4,
        "planning": 5,
        "schedule": 6,
        "worker": 7,
        "step_loop": 8,
        "engine_adapters": 9,
        "engine": 10,
        "llm": 11,
        "async_llm": 11,
        "perplexity": 12,
    },
    "infer/engine/kernels": {
        "sampler": 0,
        "loading": 0,
        "step_tensors": 0,
        "backend": 1,
        "aten": 2,
        "native": 2,
        "triton": 3,
    },
    "infer/engine/kernels/aten": {"pages": 0, "kv_cache": 1, "attention": 2},
    "infer/engine/kernels/native": {"binding": 0, "packing": 1, "packed": 2},
    "infer/engine/kernels/triton": {"step": 0, "rows": 1, "run": 1},
    "infer/engine/schedule": {
        "samples": 0,
        "step_cost": 0,
        "block_allocator": 1,
        "block_manager": 2,
        "waiting": 3,
        "proposing": 3,
    },
    "infer/serve": {
        "engine_protocol": 0,
        "errors": 0,
        "metrics": 1,
        "access": 1,
        "options": 2,
        "operations": 3,
        "call": 4,
        "grpc": 5,
        "http": 5,
        "open_inference": 6,
        "openai": 6,
        "app": 7,
    },
    "infer/serve/openai": {"page": 0},
    "model": {
        "activation": 0,
        "balance": 0,
        "norm": 0,
        "recompute": 0,
        "rope_scaling": 0,
        "shape": 1,
        "spec": 2,
        "window_keys": 2,
        "expert_keys": 3,
        "llama_family": 3,
        "lora": 4,
        "row_slices": 3,
        "placement": 5,
        "architectures": 4,
        "experts": 6,
    },
    "proto": {"open_inference": 0, "v1": 0},
    "train": {
        "config": 0,
        "context": 0,
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
    "train/config": {"deepspeed": 0},
    "train/zero": {"states": 0},
}
# The modules that compute. All other modules, policies and clients among them, work without a deep-learning stack.
COMPUTE: dict[str, str] = {
    "infer.engine.kernels": "step_tensors",
    "infer.engine.kernels.aten": "adapted_products expert_products experts interpreter kv_cache "
    "model_runner paged_attention pages prepare prepared_weights row_tiles",
    "infer.engine.kernels.aten.attention": "online_softmax plan",
    "infer.engine.kernels.triton": "append attention cache formats hadamard launches paged_attention prepare",
    "infer.engine.kernels.triton.rows": "filters fixed_products launched_products low_rank norms products samples",
    "infer.engine.kernels.triton.run": "assembly decode_graphs decoder device_adapters experts graphs kernels "
    "loaded_rank model_runner",
    "infer.engine.kernels.triton.step": "decode_ahead device_tables result_copies step_adapters",
    "model": "activation attention balance decoder init loading mlp norm peers placement recompute rope",
    "model.experts": "adapted experts mixture router shared spreads token_pairs",
    "parallel": "adapters coded_weight collectives functions fusion gpu_start grouped_products head_loss held_weight "
    "host layers linear link_factory local_link meeting mesh mlp_blocks point_to_point products row_blocks "
    "row_exchange row_groups streams token_noise torch_dtypes wide_sums",
    "parity": "close_choices flat_values foreign gradients measure reference_values updates",
    "train.context": "gather kernels tiled tiled_attention ulysses",
    "train.engine": "attention blocked_attention compiling evaluate gpu_attention nonfinite optimizer_step passes "
    "row_packer rows stages training_engine window_blocks",
    "train.foreign": "accumulation blocks buffers checks construction construction_log context_batch context_model "
    "context_parallel disguise first_values join_job model model_engine on_meta options peft_adapter reached_keys "
    "replay stored_weights take_over watch",
    "train.health": "flight_recorder",
    "train.launch": "rendezvous worker",
    "train.pipeline": "executor",
    "train.records": "metrics step_log step_profiler",
    "train.run": "adapter_base coded_base inputs run_start trainer",
    "train.saving": "checkpointer pinned_save replica_check save_in_flight saver snapshot",
    "train.zero": "absent adamw_rule agreement flat_bucket flat_buffers gradient_exchange gradient_sum outputs "
    "own_parameters parameter_gather random_rounding saved_activations saved_parameters sharded_adamw square_sum "
    "trained_parameter written_values",
    "train.zero.states": "buffer disk_states host_pool host_transfer memory_states open_states pinned_copies "
    "state_file state_store",
}


def dotted(path: Path) -> str:
    """Returns the dotted name of a module: cli/main.py -> "cli.main", cli/__init__.py -> "cli", __init__.py -> ""."""
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


def all_imports(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) for every import, inside functions and under TYPE_CHECKING too."""
    package = ["tk", *path.parent.parts]
    for node in nodes(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imports(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, name below `tk`) for every import of tk's own modules."""
    for line, name in all_imports(path, text):
        if name.split(".")[0] == "tk":
            yield line, name.removeprefix("tk.")


def broken_rules(path: Path, text: str) -> list[str]:
    """Returns a line for every import of a module that a floor forbids: in the folder where the two ways part."""
    here, wrong = path.with_suffix("").parts, []
    for line, name in imports(path, text):
        there = name.split(".")
        depth = next((i for i, (mine, other) in enumerate(zip(here, there, strict=False)) if mine != other), None)
        if depth is None or there == ["__version__"]:
            continue
        floors = FLOORS.get("/".join(here[:depth]), {})
        mine, other = here[depth], there[depth]
        if mine in floors and floors.get(other, 99) >= floors[mine]:
            wrong.append(
                f"{path}:{line}: {'/'.join(here[: depth + 1])} (floor {floors[mine]}) must not import tk.{name}"
            )
    return wrong


def test_imports_go_down_only(root: Path, sources: list[Path]) -> None:
    wrong = [line for path in sources for line in broken_rules(path, (root / path).read_text())]
    assert not wrong, "\n".join(wrong)


def folders_of(paths: Iterable[Path]) -> set[tuple[str, str]]:
    """Returns each folder with its parent: "infer/serve" is ("infer", "serve"), and "infer" is ("", "infer")."""
    parts = [path.parts[:-1] for path in paths]
    return {("/".join(names[:depth]), names[depth]) for names in parts for depth in range(len(names))}


def test_every_folder_has_a_floor_among_its_neighbours(sources: list[Path]) -> None:
    found = folders_of(sources)
    assert not [f"{parent}/{name}" for parent, name in sorted(found) if name not in FLOORS.get(parent, {})]
    assert set(FLOORS) <= {"", *(f"{parent}/{name}".removeprefix("/") for parent, name in found)}


def test_every_floor_is_of_something(sources: list[Path]) -> None:
    found = {"/".join(path.with_suffix("").parts) for path in sources}
    found |= {f"{parent}/{name}".removeprefix("/") for parent, name in folders_of(sources)}
    named = {f"{parent}/{name}".removeprefix("/") for parent, names in FLOORS.items() for name in names}
    assert not named - found


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
    benchmarks = [path.relative_to(root) for path in sorted(root.glob("benchmarks/**/*.py"))]
    assert len(benchmarks) > 30
    assert not taken_twice({path: (root / path).read_text() for path in (*sources, *benchmarks)})


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
    beside = broken_rules(Path("train/loop.py"), "def f():\n    from ..infer.engine.engine import Engine")
    spelled_out = broken_rules(Path("parallel/mesh.py"), "import tk.checkpoint.format.manifest")
    sideways_package = broken_rules(Path("infer/serve/grpc/service.py"), "from ... import train")
    assert [len(wrong) for wrong in (up, beside, spelled_out, sideways_package)] == [1, 1, 1, 1]
    assert "train (floor 3) must not import tk.infer.engine.engine.Engine" in beside[0]
    fine = "from . import unit\nfrom ..core import errors\nfrom .. import __version__\nimport torch"
    assert broken_rules(Path("data/loop.py"), fine) == []
    inside = broken_rules(Path("checkpoint/read/locate.py"), "from ..run import run_folder\nfrom .. import Checkpoint")
    assert len(inside) == 2
    assert "checkpoint/read (floor 2) must not import tk.checkpoint.run.run_folder" in inside[0]
    assert broken_rules(Path("checkpoint/read/locate.py"), "from ..files import storage\nfrom . import foreign") == []
    [same_floor] = broken_rules(Path("train/health/stop.py"), "from ..state.progress import TrainState")
    assert "train/health (floor 0) must not import tk.train.state.progress.TrainState" in same_floor
    deep = broken_rules(
        Path("infer/engine/schedule/samples/deltas.py"), "from ..scheduler import S\nfrom ..waiting import s"
    )
    assert len(deep) == 2
    assert "infer/engine/schedule/samples (floor 0) must not import tk.infer.engine.schedule.scheduler.S" in deep[0]
    assert broken_rules(Path("infer/engine/schedule/waiting/pool.py"), "from ..samples.sample import Output") == []


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
    assert {"tk", "tk.core.errors", "tk.checkpoint.read.reader", "tk.cli.main", "tk.infer.client.client"} <= set(light)
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *light], capture_output=True, text=True)
    assert run.returncode == 0, f"a module that computes belongs into COMPUTE\n{run.stdout}{run.stderr}"
