"""The blocks that a module repeats, which ZeRO stage 3 gathers one by one, and the parameters outside of them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from torch import nn

from ...core.errors import ConfigError
from ...core.progress import format_bytes

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LOG: Final = logging.getLogger(__name__)
_SHOWN: Final = 3  # names in a message


def find_blocks(
    module: nn.Module, gather_together: str | nn.Module | Sequence[str | nn.Module] = ()
) -> dict[str, nn.Module]:
    """Returns the module's blocks, by name, in their order.

    The blocks are the modules in every list, dict or sequence of two or more modules. A list in a list is no block; its
    modules are.

    Args:
        gather_together: modules, names or patterns of names (`*`, `?`, `[]`); no module inside of them is a block.

    Raises:
        ConfigError: one of `gather_together` is not in the module, or holds no block.
    """
    blocks: dict[str, nn.Module] = {}
    known: set[nn.Module] = set()
    for name, block in _blocks(module, "", listed=False):
        if block not in known:
            blocks[name] = block
            known.add(block)
    left_out: set[str] = set()
    for wish in [gather_together] if isinstance(gather_together, str | nn.Module) else gather_together:
        matching = {name for name in blocks if _is_within(name, wish, module)}
        if not matching:
            raise ConfigError(
                f"initialize(..., gather_together=[...]): {_name(wish)} is no block and holds none. The module's "
                f"blocks are {_some(list(blocks)) or 'none: it has no list, dict or sequence of modules'}."
            )
        left_out |= matching
    return {name: block for name, block in blocks.items() if name not in left_out}


def _blocks(module: nn.Module, prefix: str, listed: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yields the blocks in `module`; `listed`: whether it is in a list, and so a block unless it is a list too."""
    container = isinstance(module, _CONTAINERS) and not (listed and _computes(module))
    if listed and not container:
        yield prefix[:-1], module
        return
    for name, child in module.named_children():
        yield from _blocks(child, f"{prefix}{name}.", listed or (container and len(list(module.children())) > 1))


def _computes(module: nn.Module) -> bool:
    """Returns whether a container has a forward pass of its own, which may do more than call its modules."""
    return type(module).forward not in (nn.Module.forward, nn.Sequential.forward)


def _is_within(name: str, wish: str | nn.Module, module: nn.Module) -> bool:
    parts = name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    if isinstance(wish, str):
        return any(fnmatchcase(outer, wish) for outer in around)
    return wish is module or any(module.get_submodule(outer) is wish for outer in around)


def _name(wish: str | nn.Module) -> str:
    return repr(wish) if isinstance(wish, str) else f"a {type(wish).__name__}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def log_sizes(rest: Mapping[str, int], blocks: Mapping[str, int]) -> None:
    """Logs the sizes that stage 3 gathers at once; a warning if most of the module is outside of blocks.

    Args:
        rest: the bytes of each parameter outside of blocks.
        blocks: the bytes of each block.
    """
    whole, largest = sum(rest.values()), max(blocks, key=lambda name: blocks[name], default="")
    cut = "No blocks were found that could be gathered one by one"
    if blocks:
        cut = (
            f"{len(blocks)} blocks are gathered one by one, the largest {largest} with {format_bytes(blocks[largest])}"
        )
    names = _some(sorted(rest, key=lambda name: -rest[name]))
    kept = f"{format_bytes(whole)} that belong to no block are whole during every pass ({names})" if rest else ""
    level = logging.WARNING if whole > sum(blocks.values()) else logging.INFO
    _LOG.log(level, "ZeRO stage 3: %s%s.", cut, f"; {kept}" if kept else "")
