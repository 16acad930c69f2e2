"""The site of `make site`: every page is in its navigation once, no link in it is broken, and it can be searched."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tk.scripts.website.build import REQUIREMENTS, CannotInstall, build, environment
from tk.scripts.website.conf import NAVIGATION, include_patterns, navigation


def test_every_page_is_in_the_navigation_once(root: Path) -> None:
    pages = {
        str(path.relative_to(root).with_suffix(""))
        for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
        for path in root.glob(pattern)
        if "node_modules" not in path.parts
    }
    assert len(pages) > 50
    listed = [page for pages in navigation(pages).values() for page in pages]
    assert sorted([*listed, "README"]) == sorted(pages)
    assert include_patterns == ["*.md", "docs/**", "examples/**"]


def test_a_page_is_where_it_is_named_else_where_the_longest_pattern_fits() -> None:
    found = navigation(["README", "docs/new", "docs/lora", "docs/training/new", "docs/benchmarks/new", "NEW"])
    places = {page: caption for caption, pages in found.items() for page in pages}
    assert places == {
        "docs/new": "Inside",
        "docs/lora": "Train",
        "docs/training/new": "Train",
        "docs/benchmarks/new": "Evidence",
        "NEW": "Project",
    }
    assert list(found) == list(NAVIGATION)


def test_versions_are_exact() -> None:
    lines = REQUIREMENTS.read_text().splitlines()
    assert len(lines) > 10
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


class _Links(HTMLParser):
    """The targets of a page's links, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


def broken_links(site: Path) -> list[str]:
    """Returns the links of built pages that lead to no file, or to no anchor of a page."""
    pages = {path.resolve(): _Links(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    broken = []
    for path, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or target == "#":
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(file)
            if not file.is_file() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                broken.append(f"{path.relative_to(site.resolve())}: {target}")
    return broken


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">1</a><a href="b.html#y">2</a><img src="c.png"><a id="z">')
    (tmp_path / "b.html").write_text('<p id="x"><a href="https://example.org/">3</a><a href="a.html#z">4</a>')
    assert broken_links(tmp_path) == ["a.html: b.html#y", "a.html: c.png"]


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning_and_a_broken_link(tmp_path: Path) -> None:
    try:
        python = environment()
    except CannotInstall as error:
        pytest.skip(str(error))
    done = build(python, tmp_path / "site")
    assert (done.returncode, done.stderr) == (0, "")
    assert broken_links(tmp_path / "site") == []
    first = (tmp_path / "site" / "index.html").read_text()
    assert first == (tmp_path / "site" / "README.html").read_text()
    assert 'href="docs/tutorial.html"' in first
    index = (tmp_path / "site" / "searchindex.js").read_text()
    assert '"docs/zero"' in index
    assert '"zero"' in index
