"""Names of files in messages: the first few of many, on one line, whatever characters they have."""

from collections.abc import Sequence


def some_names(names: Sequence[str], most: int = 3) -> str:
    """Returns the first `most` names and the number of the others; a name with odd characters is quoted and escaped."""
    rest = len(names) - most
    shown = [name if name.isprintable() and name and " " not in name else repr(name) for name in names[:most]]
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
