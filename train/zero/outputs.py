"""The tensors of a module's output, inside any containers and objects."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

_PLAIN = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor of `output` once.

    The search goes into mappings, sequences, sets, types registered with torch's pytree, and the attributes and slots
    of all other objects (dataclasses too). It leaves out modules and functions.
    """
    if isinstance(output, torch.Tensor):
        yield output
        return
    # `seen` keeps the objects alive, since Python gives the id of a dead object to the next one.
    waiting, seen = [output], {id(output): output}
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
    """Returns the objects directly inside `value`: elements or values, pytree leaves, attributes, slots."""
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
