"""The public names of a package, each loaded with its module when it is first used (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def public_names(
    package: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's `__all__`, `__getattr__` and `__dir__`, so that a command loads only its own modules.

    Use it in the `else` of `if TYPE_CHECKING:`, where the same names are imported: a type checker then sees the
    imports, and refuses other names.

    Args:
        package: the package's `__name__`.
        homes: public name -> the module that defines it, relative to the package.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return sorted(homes), load, lambda: sorted(homes)
