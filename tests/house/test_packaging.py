"""The package that is installed, its dependencies, and the pins of the lock."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import tk
import tk.checkpoint
import tk.infer
import tk.train
from tk.tests.house.syntax import nodes

OUTSIDE = frozenset({"tests", "benchmarks", "docs", "examples", "scripts", "runs", "build"})


def requirements(project: dict[str, Any]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, project["project"]["dependencies"])}


def pins(root: Path) -> list[tuple[str, Version]]:
    """Returns (name, version) of each line of the lock, in its order."""
    lines = (root / "requirements.lock").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return [(canonicalize_name(name), Version(version)) for name, version in pairs]


def test_every_package_folder_is_listed(root: Path, project: dict[str, Any]) -> None:
    rooms = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in OUTSIDE]
    folders = [path.parent.relative_to(root) for room in rooms for path in room.rglob("__init__.py")]
    found = {"tk", *(".".join(["tk", *folder.parts]) for folder in folders)}
    assert found == set(project["tool"]["setuptools"]["packages"])


def third_party(root: Path, sources: list[Path]) -> set[str]:
    """Returns the names that the package imports, in functions too, without its own and the standard library's."""
    names = set()
    for path in sources:
        for node in nodes((root / path).read_text()):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module)
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names | {"tk"}}


def test_imports_are_declared_and_declarations_imported(
    root: Path, sources: list[Path], project: dict[str, Any]
) -> None:
    homes = packages_distributions()
    imported = third_party(root, sources)
    # `google` and `opentelemetry` are namespaces that several distributions share.
    used = {"protobuf" for name in imported if name.startswith("google.protobuf")}
    tops = {top for name in imported if (top := name.split(".")[0]) not in ("google", "opentelemetry")}
    used |= {canonicalize_name(homes.get(top, [top])[0]) for top in tops}  # an extra need not be installed
    groups = project["project"]["optional-dependencies"]
    extras = {
        canonicalize_name(Requirement(r).name)
        for group in ("otel", "parquet", "plot", "structured", "tensorboard")
        for r in groups[group]
    }
    # google.rpc's messages come with grpcio-status; generated code imports protobuf's runtime; triton comes with torch.
    assert used - extras - {"triton"} | {"protobuf"} == set(requirements(project))


def test_every_dependency_has_its_reason(root: Path, project: dict[str, Any]) -> None:
    reasons = (root / "docs" / "dependencies.md").read_text()
    groups = project["project"]["optional-dependencies"].values()
    extras = [canonicalize_name(Requirement(r).name) for group in groups for r in group]
    assert [name for name in [*requirements(project), *extras] if f"`{name}`" not in reasons] == []


def test_the_lock_meets_the_declared_bounds(root: Path, project: dict[str, Any]) -> None:
    locked = dict(pins(root))
    wanted = [*requirements(project).values(), *map(Requirement, project["project"]["optional-dependencies"]["dev"])]
    wrong = [str(r) for r in wanted if not r.specifier.contains(locked[canonicalize_name(r.name)], prereleases=True)]
    assert wrong == []


def test_torch_grpc_and_protobuf_have_upper_bounds_that_the_lock_reaches(root: Path, project: dict[str, Any]) -> None:
    """The release that was tested is allowed, and the next one, which was not, is refused."""
    locked = dict(pins(root))
    bounded = {name: r for name, r in requirements(project).items() if re.match("torch|grpcio|protobuf", name)}
    assert len(bounded) == 6
    for name, requirement in bounded.items():
        tested = locked[name]
        following = f"{tested.major + 1}.0" if name == "protobuf" else f"{tested.major}.{tested.minor + 1}.0"
        assert requirement.specifier.contains(tested)
        assert not requirement.specifier.contains(following), f"{requirement}: {following} was not tested"


def test_the_version_has_a_section_in_the_changelog(root: Path) -> None:
    headings = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    sections = [re.fullmatch(r"(\S+) \((not released yet|\d{4}-\d\d-\d\d)\)", heading) for heading in headings]
    assert None not in sections, f"each heading is a version and its day of release: {headings}"
    versions = [Version(section[1]) for section in sections if section]
    assert versions[0] == Version(tk.__version__), "the newest section is this version's"
    assert versions == sorted(set(versions), reverse=True)


def test_the_pythons_that_are_named_are_those_of_the_workflow(root: Path, project: dict[str, Any]) -> None:
    declared = project["project"]
    minors = [found[1] for each in declared["classifiers"] if (found := re.search(r":: (3\.\d+)$", each))]
    workflow = yaml.safe_load((root / ".github" / "workflows" / "ci.yml").read_text())
    assert minors == workflow["jobs"]["ci"]["strategy"]["matrix"]["python"]
    assert declared["requires-python"] == f">={minors[0]}"
    page = (root / "docs" / "install.md").read_text()
    assert f"Python {', '.join(minors[:-1])} and {minors[-1]}" in page


def test_the_install_page_has_every_extra_and_the_bounds_of_torch(root: Path, project: dict[str, Any]) -> None:
    page = (root / "docs" / "install.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)
    assert sorted(rows) == sorted(set(project["project"]["optional-dependencies"]))
    assert f"'{project['project']['dependencies'][0]}'" in page


def test_the_lock_names_torch_first_and_no_cuda(root: Path) -> None:
    names = [name for name, _ in pins(root)]
    assert pins(root)[0] == ("torch", Version("2.13.0"))
    assert [name for name in names if re.search("nvidia|cuda|triton", name)] == []
    assert len(names) == len(set(names))


def test_generated_code_runs_with_the_oldest_runtime_declared(root: Path, project: dict[str, Any]) -> None:
    needs = {"protobuf": r"^# Protobuf Python Version: (\S+)$", "grpcio": r"^GRPC_GENERATED_VERSION = '(\S+)'$"}
    generated = "\n".join(path.read_text() for path in sorted((root / "proto").glob("*/*_pb2*.py")))
    for name, pattern in needs.items():
        versions = {Version(found) for found in re.findall(pattern, generated, re.MULTILINE)}
        assert len(versions) == 1, f"{name}: run `make proto`"
        [lowest] = [Version(each.version) for each in requirements(project)[name].specifier if each.operator == ">="]
        assert lowest >= max(versions)


def test_public_names_are_the_promised_ones() -> None:
    promised = {"Checkpoint", "LLM", "SamplingParams", "Client", "Trainer", "TrainConfig"}
    assert set(dir(tk)) == promised
    homes = {"Checkpoint": "tk.checkpoint", "Trainer": "tk.train", "TrainConfig": "tk.train"}
    for name in promised:
        assert getattr(tk, name).__module__.startswith(homes.get(name, "tk.infer"))
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        tk.Trainr  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("package", [tk, tk.checkpoint, tk.infer, tk.train])
def test_every_public_name_is_where_its_package_says(package: ModuleType) -> None:
    assert [name for name in dir(package) if getattr(package, name, None) is None] == []
