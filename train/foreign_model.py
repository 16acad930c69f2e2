"""Any `torch.nn.Module` as the engine sees it: its tensors as a table, and the parts that ZeRO stage 3 gathers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..core.tensors import TensorSpec
from .saving.snapshot import CODES
from .zero.flat_buffers import FlatBuffers
from .zero.parameter_gather import Unit


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A module and the blocks it repeats.

    Attributes:
        blocks: the outermost modules of every `nn.ModuleList` of two or more, in their order: what a transformer calls
            its layers.
        table: one entry per name of `state_dict`; further names of a shared tensor are aliases. Buffers and parameters
            that take no gradient are not trainable.
    """

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    table: tuple[TensorSpec, ...]

    @staticmethod
    def of(module: nn.Module) -> "ForeignModel":
        """Looks a module over."""
        blocks = tuple(_blocks(module))
        return ForeignModel(module, blocks, tuple(_table(module, blocks)))

    def units(self, buffers: FlatBuffers) -> list[Unit]:
        """The module around everything that no block holds, then the blocks."""
        members: list[tuple[int | str, nn.Module]] = [("first", self.module), *enumerate(self.blocks)]
        units = [
            Unit([bucket for bucket in buffers.buckets if bucket.plan.params[0].unit == key], [module])
            for key, module in members
        ]
        return [unit for unit in units if unit.buckets]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield from child
        else:
            yield from _blocks(child)


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
