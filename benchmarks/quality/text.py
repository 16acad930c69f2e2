"""The text of bench_quality.py, from Python's own library: the same words on every machine with the same Python."""

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from tk.infer.engine.perplexity import plan_windows
from tk.text.tokenizer import Tokenizer

PROSE: Final = 110_000  # characters of the language reference
CODE: Final = 115_000  # characters of modules
MODULES: Final = ("argparse.py", "ast.py")


def write_text(path: Path, prose: int = PROSE, code: int = CODE) -> list[str]:
    """Writes two texts as JSON lines, and returns them: English of the language reference, and code of modules.

    Args:
        path: the file.
        prose, code: their numbers of characters.
    """
    library = Path(sysconfig.get_path("stdlib"))
    written = [
        "\n\n".join(topics[name] for name in sorted(topics))[:prose],
        "\n".join((library / name).read_text(encoding="utf-8") for name in MODULES)[:code],
    ]
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in written), encoding="utf-8")
    return written


def windows_of(texts: Sequence[str], tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """Returns the tokens of the windows that `tk eval` makes of texts, in which all but a window's first are scored."""
    encoded = [tokenizer.encode(text) for text in texts]
    lengths = [len(each) for each in encoded]
    return [encoded[one.text][one.start : one.stop] for one in plan_windows(lengths, context, context)]
