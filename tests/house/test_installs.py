"""Names that an installer asks an index for: no page, message or file names one that is not known, or taken for tk.

tk is on no index yet: one would answer its name with nothing, or with a stranger's package.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from tk.core.extras import DISTRIBUTION
from tk.scripts import real_parts
from tk.tests.house.test_packaging import pins

INSTALLS = re.compile(
    r"(?:\bpip3? (?:install|download|wheel)|\bpipx (?:install|run)|\buv (?:add|pip install|tool install)|\buvx"
    r"|\$\(PIP\)|\bpoetry add|\bconda install|\bnpm (?:install|i|add)|\bnpx) (.*)"
)
BEGINNINGS = ("pip ", "pip3 ", "pipx ", "uv ", "uvx ", "$(PIP) ", "poetry ", "conda ", "npm ", "npx ")  # found quickly
END = re.compile(r"`|#|;|&|\||\)|\\n|[.,](?:\s|$)|'\"|[\w>=\d]\"[ ,:]")
WITH_VALUE = re.compile(
    r"-[rceift]|--(?:requirement|constraint|editable|index-url|extra-index-url|find-links|target|wheel-dir|retries)"
)
# Packages of other people that stand in no list: an alternative that a benchmark compares with, and readers of traffic.
OTHERS = frozenset({"deepspeed", "hpack"})


def joined(text: str) -> str:
    """Returns a text in which a line that ends with a backslash is one with the next."""
    return re.sub(r"\\\n\s*", " ", text)


def installed(text: str) -> list[str]:
    """Returns the names for which the commands of a text ask an index: neither options nor paths nor variables."""
    names: list[str] = []
    if not any(beginning in text for beginning in BEGINNINGS):
        return names
    for words in INSTALLS.findall(joined(text)):
        before = ""
        for word in END.split(words, maxsplit=1)[0].split():
            bare = word.strip("'\"()[],")
            found = re.fullmatch(r"(@[\w-]+/[\w.-]+|[A-Za-z][\w.-]*)([^\w/${*].*)?", bare)
            if found and not WITH_VALUE.fullmatch(before):
                names.append(found[1])
            before = bare
    return names


@pytest.fixture(scope="module")
def known(root: Path, project: dict[str, Any]) -> frozenset[str]:
    """The packages that pyproject.toml, the lock, `make real` or a benchmark name."""
    declared = project["project"]
    peers = [line for path in (root / "benchmarks" / "peers").glob("*.txt") for line in path.read_text().splitlines()]
    parts = (*real_parts.CLIENTS, *real_parts.TRITON, *real_parts.MODEL, real_parts.NODE_WHEEL, real_parts.ENVOY)
    lines = [*declared["dependencies"], *parts, *peers]
    lines += [line for extra in declared["optional-dependencies"].values() for line in extra]
    names = {found[0] for line in lines if (found := re.match(r"[\w.-]+", line))}
    node = json.loads((root / "examples" / "clients" / "node" / "package.json").read_text())["dependencies"]
    return frozenset({*map(canonicalize_name, names), *(name for name, _ in pins(root)), *node, *OTHERS})


def strangers(texts: Iterable[tuple[str, str]], known: frozenset[str]) -> list[str]:
    """Returns the names in installing commands that are not known, each with its file."""
    return [
        f"{name}: {package}"
        for name, text in texts
        for package in installed(text)
        if package not in known and canonicalize_name(package) not in known
    ]


def test_no_line_of_any_file_installs_a_package_that_is_not_known(
    root: Path, tracked: list[str], known: frozenset[str]
) -> None:
    here = str(Path(__file__).relative_to(root))
    texts = [
        (name, (root / name).read_text(errors="replace"))
        for name in tracked
        if name != here and not name.endswith((".bin", ".safetensors"))
    ]
    assert sum(len(installed(text)) for _, text in texts) >= 10
    assert strangers(texts, known) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`pip install tk-lm`", ["tk-lm"]),
        ("pip install --upgrade 'tk-toolkit[structured]>=1'; tk serve", ["tk-toolkit"]),
        ("ExecStartPre=/opt/tk/bin/pip install tk_lm", ["tk_lm"]),
        ("RUN pip install --no-cache-dir \\\n    --index-url https://example torch tk", ["torch", "tk"]),
        ("uv add tk && npx tk-chat", ["tk"]),
        ("\t\t$(PIP) 'tk>=0.13' || \\", ["tk"]),
        ("npm install @grpc/tk", ["@grpc/tk"]),
        ("npx tk-chat", ["tk-chat"]),
        ("pip install . ; pip install '.[structured]'", []),
        ("pip install -r requirements.lock -e . wheels/tk_lm-0.1.0.whl", []),
        ('pip install "$generator" {packages}', []),
    ],
)
def test_names_in_installing_commands_are_found(text: str, names: list[str], known: frozenset[str]) -> None:
    assert installed(text) == names
    assert strangers([("x", text)], known) == [f"x: {name}" for name in names if name != "torch"]


def test_the_packages_own_name_is_in_no_list_of_known_ones(project: dict[str, Any], known: frozenset[str]) -> None:
    assert project["project"]["name"] == DISTRIBUTION
    assert [name for name in known if name in (DISTRIBUTION, "tk") or name.startswith("tk-")] == []


def test_images_of_tk_are_of_no_registry(root: Path, tracked: list[str]) -> None:
    """A cluster pulls an image by its name: `tk` alone would come from Docker's registry, where it is not ours."""
    texts = [(root / name).read_text() for name in tracked if name.endswith((".yaml", ".yml"))]
    images = [image for text in texts for image in re.findall(r"^\s*image: (\S+)$", text, re.MULTILINE)]
    ours = [image for image in images if re.search(r"\btk\b", image)]
    assert ours
    assert [image for image in ours if not image.startswith("registry.example/")] == []
