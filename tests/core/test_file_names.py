"""Names of files in messages."""

import pytest

from tk.core.file_names import some_names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a.bin", "b"], "a.bin, b"),
        (["a", "b", "c", "d", "e"], "a, b, c and 2 more"),
        (["new\nline", "esc\x1b[31m", "caf\udce9"], r"'new\nline', 'esc\x1b[31m', 'caf\udce9'"),
        (["my notes", "", "é"], "'my notes', '', é"),
    ],
)
def test_names_stay_on_one_line(names: list[str], text: str) -> None:
    assert some_names(names) == text
