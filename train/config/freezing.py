"""`[train] freeze`: patterns that select the parameters that a run does not train (no torch)."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ...core.errors import ConfigError
from ...core.tensors import TensorSpec


def without_frozen(table: Sequence[TensorSpec], patterns: Iterable[str]) -> tuple[TensorSpec, ...]:
    """Returns the table with `trainable` off for the tensors that `patterns` freeze; see `frozen_tensors`."""
    frozen = frozen_tensors(table, patterns)
    if not frozen:
        return tuple(table)
    return tuple(replace(spec, trainable=spec.trainable and (spec.alias or spec.name) not in frozen) for spec in table)


def frozen_tensors(table: Sequence[TensorSpec], patterns: Iterable[str]) -> frozenset[str]:
    """Returns the stored names of the tensors that `patterns` freeze.

    A pattern is a name, the beginning of names up to a dot ("model.layers.0"), or a glob ("*.mlp.*"). It is compared
    with a tensor's stored name and with the name of the parameter that the tensor is part of. A tied head is frozen
    with its embedding.

    Raises:
        ConfigError: a pattern matches no tensor, tensors of one parameter are frozen in part, or all are frozen.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = {spec.alias or spec.name for spec in table if any(_matches(name, pattern) for name in _names(spec))}
        if not matched:
            known = sorted({name for spec in table for name in _names(spec)})
            near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.0)
            raise ConfigError(f"[train] freeze: {pattern!r} matches no parameter; the nearest is {near[0]!r}.")
        found |= matched
    if not found:
        return frozenset()
    _check_whole(table, found)
    if all((spec.alias or spec.name) in found for spec in table if spec.trainable):
        raise ConfigError("[train] freeze leaves no parameter to train: freeze fewer.")
    return frozenset(found)


def _names(spec: TensorSpec) -> tuple[str, ...]:
    return (spec.name, spec.param) if spec.param else (spec.name,)


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern.rstrip(".") + ".") or fnmatchcase(name, pattern)


def _check_whole(table: Sequence[TensorSpec], frozen: set[str]) -> None:
    """Raises ConfigError unless all tensors of a parameter are frozen or none: they have one gradient."""
    by_param: dict[str, list[str]] = {}
    for spec in table:
        if spec.param and not spec.alias:
            by_param.setdefault(spec.param, []).append(spec.name)
    for param, names in by_param.items():
        inside = [name for name in names if name in frozen]
        if inside and len(inside) < len(names):
            free = next(name for name in names if name not in frozen)
            raise ConfigError(
                f"[train] freeze: {inside[0]} and {free} are parts of one parameter ({param}); freeze both or neither."
            )
