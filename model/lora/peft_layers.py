"""PEFT's `layers_to_transform` and `layers_pattern`: the targets of some layers, as one expression for their names."""

import re
from collections.abc import Mapping
from typing import Any, Final

from ...core.errors import CheckpointError

LAYERS: Final = "layers_to_transform"
PATTERN: Final = "layers_pattern"
_TARGETS: Final = "target_modules"


def targets_of(config: Mapping[str, Any], where: str) -> Any:
    """Returns the targets of an adapter_config.json, which are those of some layers if it names layers.

    A target that is a whole name is adapted in any layer, and others in the layers whose number, the first one in a
    module's name, is in the list: the rules of PEFT.

    Args:
        config: the file's content.
        where: the file, for messages.

    Returns:
        The value of `target_modules`, or a regular expression that whole names match.

    Raises:
        CheckpointError: the keys have values for which there is no such expression.
    """
    targets, layers, patterns = config.get(_TARGETS), config.get(LAYERS), config.get(PATTERN)
    numbers, names = _listed(layers), _listed(patterns)
    if not numbers:
        if names:
            raise CheckpointError(f"{where}: {PATTERN} = {patterns!r} needs {LAYERS}, the numbers of the layers.")
        return targets
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f"{where}: {LAYERS} = {str(layers)[:80]!r} must be numbers of layers, from 0 on.")
    if len(names) > 1 or not all(isinstance(name, str) and re.fullmatch(r"\w+", name) for name in names):
        raise CheckpointError(
            f"{where}: {PATTERN} = {str(patterns)[:80]!r}, and tk reads one name here, like 'layers'. List the modules "
            f"by their whole names in {_TARGETS} instead."
        )
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{where}: {LAYERS} is for a list of names in {_TARGETS}, not {str(targets)[:80]!r}.")
    ends = "|".join(map(re.escape, targets))
    chosen = "|".join(map(str, numbers))
    # Atomic: the first number in a name is that of its layer, and later ones are those of experts.
    first = rf"(?>(?:.*?\.)??{names[0] if names else '[^.]*'}\.(?=\d+\.))(?:{chosen})\."
    return rf"(?:{ends})|(?={first}).*\.(?:{ends})"


def _listed(value: Any) -> list[Any]:
    """Returns a value that PEFT allows to be one, several or none."""
    return value if isinstance(value, list) else [] if value in (None, "") or value is False else [value]
