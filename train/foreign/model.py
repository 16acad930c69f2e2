"""Any `torch.nn.Module` in the form that the engine needs: a table of tensors, and the units of ZeRO stage 3."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...checkpoint.format.adapter_record import AdapterRecord
from ...checkpoint.read.reader import Checkpoint
from ...core.tensors import TensorSpec
from ...parallel.torch_dtypes import format_of
from ..engine.training_engine import TrainingEngine
from ..zero.flat_bucket import ParameterBucket
from ..zero.flat_buffers import FlatBuffers
from ..zero.parameter_gather import Unit
from ..zero.states.pinned_copies import PinnedCopies
from .blocks import log_sizes
from .peft_adapter import PeftAdapter


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A module and its repeated blocks.

    Attributes:
        blocks: the repeated blocks (a transformer's layers), by name, in the order of `find_blocks`.
        table: one entry per name of `state_dict`; further names of a shared tensor are aliases. Buffers and parameters
            that take no gradient are not trainable. With an adapter, its tensors alone are stored, by PEFT's names.
        adapter: the adapter that checkpoints hold, in place of the module; None for most modules.
        record: what manifests say of it; on rank 0 alone.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    table: tuple[TensorSpec, ...]
    adapter: PeftAdapter | None = None
    record: AdapterRecord | None = None

    @staticmethod
    def of(
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        adapter: PeftAdapter | None = None,
        record: AdapterRecord | None = None,
    ) -> "ForeignModel":
        """Describes a module with its blocks."""
        table = tuple(_table(module, tuple(blocks.values()), adapter))
        return ForeignModel(module, blocks, table, adapter, record)

    def check_adapter(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError unless a checkpoint has the adapter that this module's have, if they have one."""
        if self.adapter is not None:
            self.adapter.check_stored(checkpoint, self.record)

    def side_files(self) -> dict[str, bytes]:
        """Returns the files of a checkpoint beside tensors: the config.json of a model of `transformers`."""
        to_dict = getattr(getattr(self.module, "config", None), "to_dict", None)
        return {"config.json": json.dumps(to_dict(), indent=2).encode()} if to_dict else {}

    def units(self, buffers: FlatBuffers) -> list[Unit]:
        """Returns a unit of everything outside of blocks, then a unit per block."""
        rest = Unit(
            self._buckets(buffers, "first"),
            [self.module],
            kept_for_backward=True,
            name="the parameters outside of blocks",
        )
        blocks = [
            Unit(self._buckets(buffers, number), [block], name=name)
            for number, (name, block) in enumerate(self.blocks.items())
        ]
        return [unit for unit in (rest, *blocks) if unit.buckets]

    def _buckets(self, buffers: FlatBuffers, key: int | str) -> list[ParameterBucket]:
        return [bucket for bucket in buffers.all_buckets if bucket.plan.unit == key]

    def log_sizes(self, units: Sequence[Unit]) -> None:
        """Logs the sizes of the units that stage 3 gathers."""
        sizes = {
            unit.name: {
                local.name: local.size * bucket.params.element_size()
                for bucket in unit.buckets
                for local in bucket.plan.params
            }
            for unit in units
        }
        rest = {name: size for unit in units if unit.kept_for_backward for name, size in sizes[unit.name].items()}
        log_sizes(rest, {unit.name: sum(sizes[unit.name].values()) for unit in units if not unit.kept_for_backward})


def _table(module: nn.Module, blocks: tuple[nn.Module, ...], adapter: PeftAdapter | None) -> Iterator[TensorSpec]:
    stored = adapter.names if adapter else {}
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
            stored.get(name, name),
            tuple(tensor.shape),
            layer=min(homes) if alone else "first",
            param=name if name in stored else "",
            stored=adapter is None or name in stored,
            alias="" if first == name else first,
            trainable=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
            buffer=not isinstance(tensor, nn.Parameter),
            dtype="" if isinstance(tensor, nn.Parameter) and tensor.requires_grad else format_of(tensor.dtype).code,
        )


def _parameters_outside(module: nn.Module, blocks: tuple[nn.Module, ...]) -> Iterator[torch.Tensor]:
    if any(module is block for block in blocks):
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _parameters_outside(child, blocks)


def whole_state(module: nn.Module, engine: TrainingEngine) -> dict[str, Any]:
    """Returns the module's `state_dict` with whole tensors on the CPU; shared tensors stay one. Every rank calls it."""
    copies: dict[int, torch.Tensor] = {}
    for parameter in engine.parameters_one_by_one():
        copies[id(parameter)] = _copied(parameter.detach(), engine.buffers.copies)
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = _copied(value.detach(), engine.buffers.copies)
            state[name] = copies[id(value)]
    return state


def _copied(values: torch.Tensor, copies: PinnedCopies) -> torch.Tensor:
    moved = copies.moved(values, torch.device("cpu"))
    return values.clone() if moved is values else moved
