"""Pages in plain prose: no sentence is long, and each page first says in a paragraph what it is for, and for whom."""

import re
from collections.abc import Iterator
from pathlib import Path

MAX_WORDS = 40
MAX_SUMMARY = 3  # sentences

COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCED = re.compile(r"^(?P<space> *)```.*?^(?P=space)```[^\n]*$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?:^ *\|[^\n]*\n?)+", re.MULTILINE)
HEADING = re.compile(r"^#+ [^\n]*$", re.MULTILINE)
ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
NEXT_ITEM = re.compile(rf"\n(?={ITEM.pattern})")
CODE = re.compile(r"(`+)[^`].*?\1", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!\.\.\.)[)\"'*_]*\s+")
READERS = re.compile(r"\b(?:people|engineers?|users?|operators?|authors?|you|your)\b", re.IGNORECASE)
OTHER = "\0"  # stands for a table or a block of code


def blocks(page: str) -> Iterator[str]:
    """Yields the headings, paragraphs and items of a page, with OTHER for each table and block of code.

    A span of code becomes the word Code, and a link its text.
    """
    text = COMMENT.sub("", page)
    for other in (FENCED, TABLE):
        text = other.sub(f"\n\n{OTHER}\n\n", text)
    text = HEADING.sub(r"\n\n\g<0>\n\n", text)
    in_list = False
    for block in (each for part in re.split(r"\n\s*\n", text) for each in NEXT_ITEM.split(part) if each.strip()):
        in_list = bool(ITEM.match(block)) or (in_list and block.startswith(" "))
        is_code = block.startswith("    ") and not in_list
        yield OTHER if is_code else LINK.sub(r"\1", CODE.sub("Code", block)).strip()


def num_words(sentence: str) -> int:
    """Returns the number of words: parts between spaces that have a letter or a digit."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def long_sentences(page: str) -> list[str]:
    """Returns the sentences of a page that are too long, each as its length and its first words."""
    return [
        f"{num_words(each)} words: {' '.join(each.split()[:8])}"
        for block in blocks(page)
        for each in END.split(block)
        if num_words(each) > MAX_WORDS
    ]


def fault_of_summary(page: str) -> str | None:
    """Returns why the block after the title of a page is no summary, or None if it is one."""
    title, first, *_ = [*blocks(page), OTHER, OTHER]
    if not title.startswith("# "):
        return "it does not begin with a title"
    if first == OTHER or ITEM.match(first) or first.startswith("#"):
        return "no paragraph follows the title"
    if not first.endswith((".", "!", "?")):
        return "its first paragraph does not end with a sentence"
    if len(END.split(first)) > MAX_SUMMARY:
        return f"its first paragraph has more than {MAX_SUMMARY} sentences"
    return None if READERS.search(first) else "its first paragraph does not say for whom it is"


def pages(root: Path) -> dict[str, str]:
    """Returns the text of each page of the repository by its path."""
    found = [path for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md") for path in sorted(root.glob(pattern))]
    assert len(found) > 60
    return {str(path.relative_to(root)): path.read_text() for path in found}


def test_no_sentence_is_long(root: Path) -> None:
    assert [f"{path}: {each}" for path, page in pages(root).items() for each in long_sentences(page)] == []


def test_pages_begin_with_a_summary_for_their_readers(root: Path) -> None:
    assert {path: fault for path, page in pages(root).items() if (fault := fault_of_summary(page))} == {}


LONG = " ".join(["word"] * MAX_WORDS)


def test_a_long_sentence_is_seen_wherever_prose_stands() -> None:
    for page in (
        f"{LONG} more.",
        f"Short. {LONG} more. Short.",
        f"# {LONG} more",
        f"- short\n- {LONG}\n  more",
        f"1. {LONG}\n\n   {LONG} more.",
        f"- short\n\n    {LONG} more",
        f"{LONG[15:]} i.e. e.g. more ... more",
        f"```\ncode\n```\n[{LONG}\nmore](a-target.md)",
        f"{LONG} `more of it`",
        f"| a |\n|---|\n{LONG} more",
    ):
        assert [each.partition(":")[0] for each in long_sentences(page)] == [f"{MAX_WORDS + 1} words"], page


def test_parts_that_are_no_prose_are_not_counted() -> None:
    for page in (
        f"{LONG}. {LONG}! {LONG}? (With {LONG}",
        f"# Title {LONG[5:]}\n{LONG}",
        f"{LONG}:\n- one\n- two",
        f"- {LONG}\n- {LONG}\n  1. {LONG}",
        f"```sh\n# {LONG} more\n\n{LONG} more\n```",
        f"- item\n\n  ```\n  {LONG} more\n  ```",
        f"    {LONG} more",
        f"| {LONG} | {LONG} |",
        f"<!-- {LONG}\n\n{LONG} more -->",
        f"`{LONG} more` = [`{LONG}`](a-target-of-many-words.md)",
        f'{LONG[5:]} [word](a-target.md "with a title")',
        f"{LONG} + = | -> /",
    ):
        assert long_sentences(page.replace("(With word", "(With")) == [], page


def test_a_page_without_a_summary_is_seen() -> None:
    good = "It is for people who train."
    assert fault_of_summary(f"# Title\n\n{good} It has [keys](keys.md).\n\n## Next\n") is None
    assert fault_of_summary(f"# Title\n<!-- a note -->\n{good}\n- item\n") is None
    for page, fault in {
        f"{good}\n": "a title",
        "# Title\n": "no paragraph",
        f"# Title\n\n## Next\n\n{good}\n": "no paragraph",
        f"# Title\n\n- {good}\n": "no paragraph",
        f"# Title\n\n```\ntk train\n```\n\n{good}\n": "no paragraph",
        f"# Title\n\n| a |\n|---|\n\n{good}\n": "no paragraph",
        "# Title\n\nPeople write:\n\n    code\n": "end with a sentence",
        f"# Title\n\n{good} One. Two. Three.\n": "more than 3",
        "# Title\n\nIt has keys.\n": "for whom",
    }.items():
        assert fault in (fault_of_summary(page) or ""), page
