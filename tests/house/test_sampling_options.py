"""A sampling option that is a number of a row is written by hand in few files: the table of options does the rest."""

import re
from pathlib import Path

import pytest

MOST_FILES = 6  # the .proto apart; a filter has its effect in numpy, in C and on GPUs
OPTIONS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def files_that_name(option: str, root: Path, sources: list[Path]) -> list[str]:
    """Returns the hand-written files of the product, in Python and C, in which the name of an option stands."""
    native = [path.relative_to(root) for kind in ("c", "h") for path in sorted(root.glob(f"infer/**/*.{kind}"))]
    named = re.compile(rf"(?<![a-z]){option}(?![a-z])")
    return [str(path) for path in (*sources, *native) if named.search((root / path).read_text())]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_sampling_option_touches_few_files(option: str, root: Path, sources: list[Path]) -> None:
    found = files_that_name(option, root, sources)
    assert "infer/engine/request/sampling_params.py" in found
    assert any(path.endswith(".c") for path in found)
    assert len(found) <= MOST_FILES, found
