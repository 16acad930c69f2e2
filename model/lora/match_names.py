"""The child of `require_quick`: `python -m` this module matches regular expressions with names, and answers nothing."""

import json
import re
import sys

from ...core.process import die_with_parent


def match() -> None:
    """Matches each expression of the JSON document on stdin with each of its names."""
    work = json.load(sys.stdin)
    for expression in map(re.compile, work["expressions"]):
        for name in work["names"]:
            expression.fullmatch(name)


if __name__ == "__main__":
    die_with_parent()
    match()
