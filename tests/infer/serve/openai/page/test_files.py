"""The page's files as a browser without a token gets them, and the rules that keep a model's text from being markup.

tests/real/test_page.py uses the page in a real browser.
"""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tk.infer.serve.openai.page import files
from tk.infer.serve.openai.page.files import FILES
from tk.tests.infer.serve.fake_engine import FakeEngine
from tk.tests.infer.serve.http.http_server import HttpServerThread

FOLDER = Path(files.__file__).parent
SCRIPTS = ("page.js", "server.js")
# Names with which a script makes markup, code or a style of a text.
MARKUP = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|\beval\b|new Function|srcdoc|\.style\b"
)


class Markup(HTMLParser):
    """The elements of a page: their names and attributes, and the text in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("script", "style"):
            self.inline += data.strip()


@pytest.fixture(scope="module")
def markup() -> Markup:
    return Markup((FOLDER / "index.html").read_text())


@pytest.mark.parametrize(("path", "name", "media_type"), FILES)
def test_every_file_is_sent_with_a_strict_policy(
    server: HttpServerThread, path: str, name: str, media_type: str
) -> None:
    answer = server.ask(path)
    assert (answer.status, answer.headers["content-type"]) == (200, media_type)
    assert answer.body == (FOLDER / name).read_bytes()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"unsafe|https?:|data:|\*", policy)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_files_need_no_token_and_nothing_but_get(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"alice generate {'ab' * 32}\n")
    server = HttpServerThread(engine, http_port=0, tokens=tmp_path / "tokens")
    for path, _, _ in FILES:
        assert server.ask(path).status == 200
        assert server.ask(path, b"{}").status == 405
    assert server.ask("/page/files.py").status == 401
    server.close()


def test_every_file_of_the_folder_is_sent() -> None:
    assert {name for _, name, _ in FILES} == {path.name for path in FOLDER.iterdir() if path.suffix not in ("", ".py")}


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere(markup: Markup) -> None:
    assert markup.inline == ""
    names = {path.removeprefix("/") for path, _, _ in FILES}
    for tag, attributes in markup.elements:
        assert tag not in ("style", "iframe", "base")
        assert not [name for name in attributes if name == "style" or name.startswith("on")], attributes
        for name in ("src", "href", "action"):
            if name in attributes:
                assert attributes[name] in names, "a relative name, so that the page works below another path too"


def test_scripts_name_elements_that_the_page_has(markup: Markup) -> None:
    ids = [attributes["id"] for _, attributes in markup.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'\bat\("([\w-]+)"\)', (FOLDER / "page.js").read_text()))
    assert len(used) > 15
    assert used <= set(ids)


def test_every_field_has_a_label(markup: Markup) -> None:
    labelled = {attributes["for"] for tag, attributes in markup.elements if tag == "label" and "for" in attributes}
    for number, (tag, attributes) in enumerate(markup.elements):
        if tag in ("input", "textarea"):
            assert attributes.get("id") in labelled or markup.elements[number - 1][0] == "label", attributes


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_markup_of_texts(name: str) -> None:
    assert re.findall(MARKUP, (FOLDER / name).read_text()) == []
