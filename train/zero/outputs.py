"""The tensors of a module's output, in whatever they are wrapped."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor of `output` once: of mappings, sequences and sets, of what is registered with torch's pytree, of
    dataclasses and any other object's attributes. Modules are not looked into."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    waiting, seen = [output], {id(output): output}  # kept alive: an id is one object's while it lives
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif not isinstance(value, _PLAIN) and not callable(value):
            for part in _parts(value):
                if id(part) not in seen:
                    seen[id(part)] = part
                    waiting.append(part)


def _parts(value: Any) -> Iterable[Any]:
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, list | tuple | AbstractSet):
        parts += value
    else:
        leaves = _pytree.tree_leaves(value)
        parts += leaves if not (len(leaves) == 1 and leaves[0] is value) else []
    parts += getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        parts += [getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)]
    return parts
