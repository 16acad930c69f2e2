"""The reader of blocks: their language, place and mark."""

import pytest

from tk.tests.docs.blocks import Block, read_blocks

PAGE = """\
# Head

```
tk train a.toml
```

<!-- not run: needs a network -->
```sh
pip install torch
```

- An item:

  ```python
  if True:
      print(1)
  ```

A drawing:

<!-- run by tests/test_page.py -->
```
tp -> dp
  tk generate c
```
"""


def test_blocks_have_their_language_their_place_and_their_mark() -> None:
    assert list(read_blocks("page.md", PAGE)) == [
        Block("page.md", 4, "sh", "tk train a.toml\n"),
        Block("page.md", 9, "sh", "pip install torch\n", "needs a network"),
        Block("page.md", 15, "python", "if True:\n    print(1)\n"),
        Block("page.md", 23, "text", "tp -> dp\n  tk generate c\n", run_by="tests/test_page.py"),
    ]


def test_a_script_is_a_block_of_a_shell_or_what_a_text_shows() -> None:
    scripts = [block.script for block in read_blocks("page.md", PAGE)]
    assert scripts == ["tk train a.toml\n", "pip install torch\n", "", "tk generate c\n"]
    assert Block("page.md", 1, "text", "tk plan CONFIG [--json]\n").script == ""


def test_a_mark_holds_for_the_block_right_after_it() -> None:
    far = "<!-- not run: takes minutes -->\n\n```sh\nmake\n```\n"
    assert [block.mark for block in read_blocks("page.md", far)] == [None]


def test_a_block_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="'```' is not in list"):
        list(read_blocks("page.md", "```\ntk train\n"))
