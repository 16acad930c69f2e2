"""The modules that an adapter's options select, by the rules of PEFT, and the adapter that each of them gets."""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from ...core.errors import ConfigError
from ...core.tensors import TensorSpec
from ..spec import AdapterSpec
from .options import ALL_LINEAR, LoraOptions, Modules

Number = TypeVar("Number", int, float)


def module_of(tensor: str) -> str:
    """Returns the name of the module of a stored tensor: model.norm for model.norm.weight."""
    return tensor.rpartition(".")[0]


def is_adaptable(spec: TensorSpec) -> bool:
    """Returns whether a tensor is the weight of a linear layer that can have an adapter: one that tp splits.

    Embedding and head are trained whole instead, and routers never.
    """
    return isinstance(spec.layer, int) and len(spec.shape) == 2 and spec.split is not None


def adapters_of(table: Sequence[TensorSpec], options: LoraOptions) -> dict[str, AdapterSpec]:
    """Returns the adapters of a model, by the names of the weights that have one.

    Raises:
        ConfigError: an option selects nothing, or a module that cannot have an adapter.
    """
    saved = saved_modules(table, options)
    modules = {module_of(spec.name): spec for spec in table if is_adaptable(spec)}
    _check_known(options.targets, "targets", table, modules)
    _check_known(options.exclude, "exclude", table, modules)
    found = {spec.name: adapter_of(name, options) for name, spec in modules.items() if _is_chosen(name, options, saved)}
    if not found:
        raise ConfigError(
            "[lora] exclude and modules_to_save leave no module of targets with an adapter: exclude fewer."
        )
    for key, patterns in (("rank_pattern", options.rank_pattern), ("alpha_pattern", options.alpha_pattern)):
        for pattern in patterns:
            if not any(_fits(pattern, module_of(name)) for name in found):
                raise ConfigError(f"[lora] {key}: {pattern!r} matches no module that has an adapter.")
    return found


def without_idle(table: Sequence[TensorSpec], options: LoraOptions) -> LoraOptions:
    """Returns the options without the entries that select nothing in a model.

    PEFT allows them: a list of targets often has the names of several architectures.
    """
    every = {module_of(spec.name) for spec in table}
    adaptable = [module_of(spec.name) for spec in table if is_adaptable(spec)]
    options = options.model_copy(
        update={
            "targets": _some(options.targets, every) or options.targets,
            "exclude": _some(options.exclude, adaptable),
            "modules_to_save": tuple(end for end in options.modules_to_save if _saved_by(end, every)),
        }
    )
    saved = saved_modules(table, options)
    chosen = [name for name in adaptable if _is_chosen(name, options, saved)]
    patterns = {
        key: {pattern: value for pattern, value in values.items() if any(_fits(pattern, name) for name in chosen)}
        for key, values in (("rank_pattern", options.rank_pattern), ("alpha_pattern", options.alpha_pattern))
    }
    return options.model_copy(update=patterns)


def repeating_expressions(options: LoraOptions) -> list[str]:
    """Returns the regular expressions for names of modules that repeat a part: their match may take many steps."""
    whole = [each for each in (options.targets, options.exclude) if isinstance(each, str) and each != ALL_LINEAR]
    ends = [*options.rank_pattern, *options.alpha_pattern]
    return [*filter(_repeats, whole), *map(_ending, filter(_repeats, ends))]


def _repeats(pattern: str) -> bool:
    return not set("*+?{").isdisjoint(pattern)


def saved_modules(table: Sequence[TensorSpec], options: LoraOptions) -> frozenset[str]:
    """Returns the modules that `modules_to_save` names, and all modules within them.

    Raises:
        ConfigError: an entry names no module.
    """
    modules = list(dict.fromkeys(module_of(spec.name) for spec in table))
    found: set[str] = set()
    for end in options.modules_to_save:
        matched = _saved_by(end, modules)
        if not matched:
            raise ConfigError(f"[lora] modules_to_save: {end!r} names no module{_nearest(end, modules)}")
        found |= matched
    return frozenset(found)


def _saved_by(end: str, modules: Iterable[str]) -> set[str]:
    return {module for module in modules if any(part.endswith(end) for part in _beginnings(module))}


def _is_chosen(module: str, options: LoraOptions, saved: Collection[str]) -> bool:
    return _selects(options.targets, module) and not _selects(options.exclude, module) and module not in saved


def _some(chosen: Modules, modules: Collection[str]) -> Modules:
    """Returns the entries that select one of the modules."""
    if isinstance(chosen, str):
        return chosen if any(_selects(chosen, name) for name in modules) else ()
    return tuple(end for end in chosen if any(_is_end(end, name) for name in modules))


def adapter_of(module: str, options: LoraOptions) -> AdapterSpec:
    """Returns the adapter that a module gets which the options select."""
    rank = _of_pattern(options.rank_pattern, module, options.rank)
    alpha = _of_pattern(options.alpha_pattern, module, options.alpha)
    return AdapterSpec(rank, alpha / (math.sqrt(rank) if options.rslora else rank), options.dropout)


def _of_pattern(patterns: Mapping[str, Number], module: str, otherwise: Number) -> Number:
    return next((value for pattern, value in patterns.items() if _fits(pattern, module)), otherwise)


def _fits(pattern: str, module: str) -> bool:
    return re.match(_ending(pattern), module) is not None


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _selects(modules: Modules, name: str) -> bool:
    if isinstance(modules, str):
        return modules == ALL_LINEAR or re.fullmatch(modules, name) is not None
    return any(_is_end(end, name) for end in modules)


def _is_end(end: str, name: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _beginnings(module: str) -> Iterable[str]:
    """Yields the module's name and those of the modules around it."""
    parts = module.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _check_known(chosen: Modules, key: str, table: Sequence[TensorSpec], modules: Collection[str]) -> None:
    """Raises ConfigError for an entry that selects no module that can have an adapter."""
    for end in (chosen,) if isinstance(chosen, str) else chosen:
        one = end if isinstance(chosen, str) else (end,)
        if any(_selects(one, name) for name in modules):
            continue
        others = (module_of(spec.name) for spec in table)
        other = next((name for name in others if _selects(one, name)), None)
        if other is None:
            raise ConfigError(f"[lora] {key}: {end!r} selects no module{_nearest(end, modules)}")
        raise ConfigError(
            f"[lora] {key}: {other} has no adapter in tk, only linear layers inside a decoder layer except routers. "
            "Embeddings, norms and the head can be trained whole: [lora] modules_to_save."
        )


def _nearest(end: str, modules: Iterable[str]) -> str:
    names = sorted({name.rpartition(".")[2] for name in modules})
    near = difflib.get_close_matches(end, names, n=1, cutoff=0.0)
    return f"; the nearest is {near[0]!r}." if near else "."
