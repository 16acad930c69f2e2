"""The lowest version that pyproject.toml allows of every package: they fit together, and go from text to text.

Torch has the version of the lock, whose build for CPUs is at hand.
"""

import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tk.tests.real.installed import ROOT, build_distributions, install_torch, serve, train
from tk.tests.real.interpreters import OWN, bare, install, interpreter, run

pytestmark = [pytest.mark.real, pytest.mark.matrix, pytest.mark.timeout(3600)]
EXTRAS = ("otel", "parquet", "plot", "structured", "tensorboard")
WRITE_PARQUET = """
import pyarrow, pyarrow.parquet
rows = pyarrow.table({"prompt": ["a"] * 9, "completion": [" b"] * 9})
pyarrow.parquet.write_table(rows, "rows.parquet")
"""


def lowest_versions() -> list[str]:
    """Returns a constraint, name==version, for each package that a user's installation may have, but not for torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    lowest = []
    for requirement in map(Requirement, lines):
        bounds = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
        if requirement.name != "torch":
            lowest.append(f"{requirement.name}=={min(bounds)}")
    return lowest


def test_the_lowest_versions_go_together_from_text_to_text(tmp_path: Path) -> None:
    program = interpreter(OWN)
    run([program, "-m", "venv", tmp_path / "environment"], tmp_path, bare(tmp_path, program.parent))
    python = tmp_path / "environment" / "bin" / "python"
    variables = bare(tmp_path, python.parent)
    install_torch(python, OWN, variables)
    (tmp_path / "dist").mkdir()
    wheel = build_distributions(tmp_path / "dist").wheel
    install(python, [f"{wheel}[{','.join(EXTRAS)}]", *lowest_versions()], tmp_path, variables)
    run([python, "-m", "pip", "check"], tmp_path, variables)

    folder = tmp_path / "work"
    folder.mkdir()
    train(python, folder, variables, "metrics.tensorboard=true")
    assert list((folder / "runs" / "tiny" / "tensorboard").iterdir())
    run([python, "-c", WRITE_PARQUET], folder, variables)

    def command(*words: str) -> str:
        return run([python, "-m", "tk", *words], folder, variables)

    command("data", "prepare", "rows.parquet", "--tokenizer", "tokenizer", "--out", "rows")
    command("plot", "runs/tiny", "-o", "curves.png")
    (folder / "schema.json").write_text(json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}))
    constrained = ("generate", "tp1", "Training", "--json-schema", "schema.json", "--max-new-tokens", "40")
    assert isinstance(json.loads(command(*constrained)), list)
    serve(python, folder, variables, "--http", "0", "--otlp-endpoint", "http://127.0.0.1:9")
