"""The settings of Sphinx for the site of `make site`: README, docs/ and the pages beside them, as they lie."""

import re
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

# The navigation: captions, and the pages below each, where a pattern stands for all pages that no other line names.
NAVIGATION: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "Begin": (
            "docs/install",
            "docs/tutorial",
            "docs/sizing",
            "docs/commands",
            "docs/terminal",
            "docs/troubleshooting",
        ),
        "Train": (
            "docs/training/README",
            "docs/training/configuration",
            "docs/training/data",
            "docs/training/planning",
            "docs/training/layouts",
            "docs/lora",
            "docs/offload",
            "docs/training/*",
        ),
        "Serve": (
            "docs/serving",
            "docs/http",
            "docs/wire",
            "docs/open-inference",
            "docs/operating",
            "docs/observability",
            "examples/*",
        ),
        "Inside": (
            "docs/architecture",
            "docs/zero",
            "docs/pipeline",
            "docs/saving",
            "docs/request",
            "docs/trails",
            "docs/kernels",
            "docs/gpu-serving",
            "docs/native",
            "docs/checkpoint-format",
            "docs/*",
        ),
        "Evidence": (
            "docs/parity*",
            "docs/foreign-modules",
            "docs/benchmarks/*",
        ),
        "Project": (
            "CHANGELOG",
            "*",
        ),
    }
)

project = "tk"
author = "the authors of tk"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/**"]
exclude_patterns = [".*", "runs", "**/node_modules"]
html_theme = "furo"
html_title = "tk"
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4

_FOLDER_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^()#:]+/)\)")


def navigation(pages: Iterable[str]) -> dict[str, list[str]]:
    """Returns the pages below each caption, every page once: where it is named, else where the longest pattern fits."""
    wanted = [(caption, pattern) for caption, patterns in NAVIGATION.items() for pattern in patterns]
    found: dict[tuple[str, str], list[str]] = {each: [] for each in wanted}
    for page in sorted(set(pages) - {root_doc}):
        fitting = [each for each in wanted if fnmatch(page, each[1])]
        found[max(fitting, key=lambda each: ("*" not in each[1], len(each[1])))].append(page)
    return {caption: [page for each in wanted if each[0] == caption for page in found[each]] for caption in NAVIGATION}


def _prepare(app: Any, page: str, source: list[str]) -> None:
    """Gives the first page the navigation; a link to a folder leads to the folder's page, or is text without one."""
    folder = Path(app.srcdir, page).parent

    def leads(match: re.Match[str]) -> str:
        found = match[2] + "README.md"
        return f"[{match[1]}]({found})" if (folder / found).is_file() else match[1]

    source[0] = _FOLDER_LINK.sub(leads, source[0])
    if page == root_doc:
        for caption, pages in navigation(app.env.found_docs).items():
            lines = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def _add_index(app: Any, error: Exception | None) -> None:
    """Makes the first page the one that a browser shows for the folder."""
    if error is None:
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Any) -> None:
    """Connects the two functions with the events of a build."""
    app.connect("source-read", _prepare)
    app.connect("build-finished", _add_index)
