"""Any `torch.nn.Module` as the engine sees it: its tensors as a table, and the parts that ZeRO stage 3 gathers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.reader import Checkpoint
from ..core.errors import ConfigError, ShapeMismatch
from ..core.tensors import TensorSpec
from .engine import Engine
from .foreign_blocks import tell_sizes
from .saving.snapshot import CODES
from .zero.flat_buffers import FlatBucket, FlatBuffers
from .zero.parameter_gather import Unit

_AFTER = "after initialize, so that it would not be trained and saved as it is. Change the module first."
_FLOATS = {"F32", "BF16", "F16"}


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A module and the blocks it repeats.

    Attributes:
        blocks: what a transformer calls its layers, by name, in the order they are listed (`find_blocks`).
        parameters: by every name, with whether they learn, as `initialize` found them.
        table: one entry per name of `state_dict`; further names of a shared tensor are aliases. Buffers and parameters
            that take no gradient are not trainable.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    parameters: Mapping[str, tuple[nn.Parameter, bool]]
    table: tuple[TensorSpec, ...]

    @staticmethod
    def of(module: nn.Module, blocks: Mapping[str, nn.Module]) -> "ForeignModel":
        """Looks a module over."""
        parameters = {
            name: (parameter, parameter.requires_grad)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        return ForeignModel(module, blocks, parameters, tuple(_table(module, tuple(blocks.values()))))

    def check_unchanged(self) -> None:
        """Raises ConfigError unless the module has the parameters that it was taken over with, and those alone: others
        would be neither trained nor saved."""
        now = dict(self.module.named_parameters(remove_duplicate=False))
        for name, (parameter, learns) in self.parameters.items():
            if now.pop(name, None) is not parameter:
                raise ConfigError(f"The parameter {name} was replaced or removed {_AFTER}")
            if parameter.requires_grad != learns:
                raise ConfigError(f"The parameter {name} was {'frozen' if learns else 'unfrozen'} {_AFTER}")
        for name in now:
            raise ConfigError(f"The parameter {name} was added {_AFTER}")

    def check_names(self) -> None:
        """Raises ConfigError where `state_dict` has names that were not there when the module was taken over."""
        known = {spec.name for spec in self.table}
        for name in self.module.state_dict(keep_vars=True):
            if name not in known:
                raise ConfigError(f"The buffer {name} was added {_AFTER}")

    def check_stored(self, checkpoint: Checkpoint) -> None:
        """Raises ShapeMismatch unless a checkpoint has just this module's tensors; integers in their very dtype."""
        slots = {spec.name: spec for spec in self.table if not spec.alias}
        extra = sorted(checkpoint.tensors.keys() - {spec.name for spec in self.table})
        if extra:
            raise ShapeMismatch(f"{checkpoint.path} has {extra[0]}, and the module has no tensor of that name.")
        for name, spec in slots.items():
            found = checkpoint.tensors.get(name)
            if found is None:
                raise ShapeMismatch(f"{checkpoint.path} has no tensor {name}, which the module has.")
            if tuple(found.shape) != spec.shape:
                raise ShapeMismatch(
                    f"{checkpoint.path}: {name} has shape {list(found.shape)}, and {list(spec.shape)} in the module."
                )
            code = found.slots["weight"]
            if spec.dtype and code != spec.dtype and not {code, spec.dtype} <= _FLOATS:
                raise ShapeMismatch(f"{checkpoint.path}: {name} is {code}, and {spec.dtype} in the module.")

    def units(self, buffers: FlatBuffers) -> list[Unit]:
        """The module around everything that no block holds, then the blocks."""
        rest = Unit(self._buckets(buffers, "first"), [self.module], all_along=True, name="what belongs to no block")
        blocks = [
            Unit(self._buckets(buffers, number), [block], name=name)
            for number, (name, block) in enumerate(self.blocks.items())
        ]
        return [unit for unit in (rest, *blocks) if unit.buckets]

    def _buckets(self, buffers: FlatBuffers, key: int | str) -> list[FlatBucket]:
        return [bucket for bucket in buffers.buckets if bucket.plan.params[0].unit == key]

    def tell_sizes(self, units: Sequence[Unit]) -> None:
        """Logs what stage 3 gathers at once."""
        sizes = {
            unit.name: {
                local.name: local.size * bucket.params.element_size()
                for bucket in unit.buckets
                for local in bucket.plan.params
            }
            for unit in units
        }
        rest = {name: size for unit in units if unit.all_along for name, size in sizes[unit.name].items()}
        tell_sizes(rest, {unit.name: sum(sizes[unit.name].values()) for unit in units if not unit.all_along})


def _table(module: nn.Module, blocks: tuple[nn.Module, ...]) -> Iterator[TensorSpec]:
    block_of: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            block_of.setdefault(id(parameter), set()).add(number)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = {id(p) for p in _parameters_outside(module, blocks)}
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        homes = block_of.get(id(tensor), set())
        alone = len(homes) == 1 and id(tensor) in in_blocks and id(tensor) not in outside
        yield TensorSpec(
            name,
            tuple(tensor.shape),
            layer=min(homes) if alone else "first",
            alias="" if first == name else first,
            trainable=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
            dtype="" if isinstance(tensor, nn.Parameter) and tensor.requires_grad else CODES[tensor.dtype],
        )


def _parameters_outside(module: nn.Module, blocks: tuple[nn.Module, ...]) -> Iterator[torch.Tensor]:
    if any(module is block for block in blocks):
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _parameters_outside(child, blocks)


def whole_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """The module's `state_dict` with whole tensors on the CPU, shared ones as one; every rank calls it."""
    copies: dict[int, torch.Tensor] = {}
    for parameter in engine.parameters_one_by_one():
        copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = value.detach().to("cpu", copy=True)
            state[name] = copies[id(value)]
    return state
