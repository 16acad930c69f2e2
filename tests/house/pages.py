"""The sections of pages, by the anchors that links to them have."""

import re
from pathlib import Path

_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def anchor_of(heading: str) -> str:
    """Returns the anchor that a heading gets: lower case, without marks, with hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def sections(page: Path) -> dict[str, str]:
    """Returns the text of each section by its anchor, with those inside it; "" is the anchor of the whole page."""
    text = page.read_text()
    plain = _FENCED.sub(lambda block: re.sub("^#", " ", block[0], flags=re.MULTILINE), text)  # comments of the shell
    found = list(_HEADING.finditer(plain))
    result = {"": text}
    for number, heading in enumerate(found):
        later = (each.start() for each in found[number + 1 :] if len(each[1]) <= len(heading[1]))
        result[anchor_of(heading[2])] = text[heading.start() : next(later, len(text))]
    return result
