"""The operators that run while modules are built under `on_meta`: each is recorded, and those of parameters not run.

Random numbers for tensors without memory are not drawn. Until another tensor needs numbers of the same generator, or a
value depends on them, the generator is left with a seed of ours, which marks the place; a seed or state that the code
sets meanwhile is thereby noticed.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ...core.errors import ConfigError
from .construction_log import ConstructionLog, Operation
from .replay import state_after, value_of

_MOVED: Final = frozenset({"aten::set_", "aten::set_data"})  # they change a tensor, not memory
_READ: Final = frozenset(  # their result's shape, or a number in Python, depends on values
    {
        *("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select"),
        *(
            "aten::_unique2",
            "aten::unique_dim",
            "aten::unique_consecutive",
            "aten::bincount",
            "aten::repeat_interleave",
        ),
        *("aten::allclose", "aten::is_same_size", "aten::argwhere"),
    }
)
_UNDECLARED: Final = {"aten::native_batch_norm": (3, 4)}  # running statistics, which it changes without a word
_OF_AUTOCAST: Final = frozenset(
    {*("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::dot"), "aten::convolution"}
)


class Construction(TorchDispatchMode):
    """Runs operators on real memory as always, and those on tensors without memory for their shapes alone.

    Attributes:
        log: the operations.
        newest: the parameter that was registered last, for messages.
        asked_for_meta: whether the code that runs asked for the meta device itself; what it makes there stays there.
        autocast: whether that code runs under torch.autocast.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = ConstructionLog()
        self.newest = "no parameter"
        self.asked_for_meta = self.autocast = False
        self._owners: dict[int, str] = {}  # the parameter that was registered last in a slot
        self._marks = secrets.randbits(40) << 20  # + a number: a seed that no other code sets
        self._drawn_last: dict[int, Operation] = {}  # by the mark in the generator
        self._generators: list[torch.Generator] = []
        self._stale: set[int] = set()  # slots with values that memory of theirs lacks

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator."""
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if self.autocast and func._schema.name in _OF_AUTOCAST:
            raise ConfigError(
                f"Inside of tk.train.on_meta {func} runs under torch.autocast, which leaves out tensors without "
                "memory. Build the module outside of autocast."
            )
        foreign = [t for t in tensors if t.layout != torch.strided or (t.is_meta and not self.log.knows(t))]
        ours = any(tensor.is_meta and self.log.knows(tensor) for tensor in tensors)
        if foreign or func._schema.name in _MOVED or (self.asked_for_meta and not ours):
            if foreign and ours:
                raise ConfigError(
                    f"Inside of tk.train.on_meta {func} joins a parameter with a tensor that was on the meta device "
                    "before, or with a sparse one. Build the module that does it outside of on_meta."
                )
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        asked = kwargs.get("device")
        to_meta = (
            asked is not None and torch.device(asked).type == "meta"
        )  # torch itself asks for numbers beside others
        recorded = kwargs | {"device": torch.device("cpu")} if to_meta else kwargs
        operation = self.log.operation(func, args, recorded, written)
        absent = to_meta or ours
        real = not absent or _needs_values(func, kwargs) or any(not tensor.is_meta for tensor in written)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._begin_draw(operation, real)
        results = NotImplemented if real else _shapes_of(func, args, kwargs, written)
        if results is NotImplemented:
            args, kwargs = tree_map_only(torch.Tensor, self._present, (args, recorded))
            results = func(*args, **kwargs)
            if operation.generator is not None:
                operation.end = operation.generator.get_state()
        else:
            self._stale |= operation.writes
        self.log.append(operation, results)
        return results

    def absent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without memory in the place of one that has some."""
        place = self.log.settle(tensor)
        storage = torch.UntypedStorage(self.log.sizes[place.slot], device="meta")
        self.log.share_slot(storage, place.slot)
        return place.on(storage)

    def register_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Called when a module registers a parameter: takes its memory away.

        Raises:
            ConfigError: it has no shape yet.
        """
        self.newest = name
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"{name} has no shape before a first batch, so it cannot be built under tk.train.on_meta. Give the "
                "layer its sizes, or build the module outside of on_meta and run a batch through it."
            )
        if parameter.layout != torch.strided or (parameter.is_meta and not self.log.knows(parameter)):
            return
        if not parameter.is_meta:
            self._make_absent(parameter)
        self._owners[self.log.place(parameter).slot] = name

    def register_buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor | None:
        """Called when a module registers a buffer: returns it with values if it has none, else None.

        Raises:
            ConfigError: it lies in a parameter's memory.
        """
        if buffer.layout != torch.strided or not self.log.knows(buffer):
            return None
        slot = self.log.place(buffer).slot
        if slot in self._owners:
            raise ConfigError(
                f"The buffer {name} lies in the memory of the parameter {self._owners[slot]}: training would part "
                "them. Clone one of them."
            )
        if not buffer.is_meta:
            return None
        made = value_of(self.log, buffer)
        self.log.share_slot(made.untyped_storage(), slot)
        return made

    def _make_absent(self, parameter: nn.Parameter) -> None:
        """Takes a parameter's memory away; the object stays the same, for all who hold it."""
        twin = torch.Tensor._make_subclass(type(parameter), self.absent(parameter), parameter.requires_grad)
        vars(twin).update(vars(parameter))
        try:
            torch.utils.swap_tensors(parameter, twin)
        except RuntimeError as error:
            raise ConfigError(
                f"{self.newest} was used in a computation, or has a weak reference, before the module registered it, "
                "so that tk.train.on_meta cannot take its memory away. Register it first, or build the module outside "
                "of on_meta."
            ) from error

    def end(self) -> None:
        """Ends the record; puts generators that hold a mark back to their state before the numbers not drawn."""
        self.log.close()
        for generator in self._generators:
            start: Operation | torch.Tensor | None = self._position(generator)
            while isinstance(start, Operation):
                start = start.end if start.end is not None else start.start
            if isinstance(start, torch.Tensor):
                generator.set_state(start)

    def _present(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with its values: made now, or brought up to date, if it has none or old ones."""
        if tensor.is_meta:
            return value_of(self.log, tensor)
        place = self.log.place(tensor)
        if place.slot in self._stale:
            new = value_of(self.log, tensor).untyped_storage()
            tensor.untyped_storage().copy_(new)
        return tensor

    def _begin_draw(self, operation: Operation, real: bool) -> None:
        """Notes from which state an operation draws; sets the generator to it, or leaves a mark in it."""
        generator = operation.kwargs.get("generator") or torch.default_generator
        if not any(generator is known for known in self._generators):
            self._generators.append(generator)
        operation.generator, operation.start = generator, self._position(generator)
        if not real:
            mark = self._marks + len(self._drawn_last)
            self._drawn_last[mark] = operation
            generator.manual_seed(mark)
        elif isinstance(operation.start, Operation):
            generator.set_state(state_after(self.log, operation.start))

    def _position(self, generator: torch.Generator) -> Operation | torch.Tensor:
        """Returns the operation whose numbers come before the next, if they are not drawn; else the state."""
        return self._drawn_last.get(generator.initial_seed()) or generator.get_state()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an operator changes in place."""
    undeclared = [args[index] for index in _UNDECLARED.get(func._schema.name, ())]
    arguments = func._schema.arguments
    named = zip(arguments, args, strict=False)
    values = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
    changing = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    return _tensors([*undeclared, *values, *(value for name, value in kwargs.items() if name in changing)])


def _needs_values(func: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether an operator gives back values, in Python or on a real device."""
    device = kwargs.get("device")
    return func._schema.name in _READ or (device is not None and torch.device(device).type != "meta")


def _shapes_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> Any:
    """Runs an operator on the meta device; NotImplemented if it cannot be run there."""
    args, kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        if len(written) == 1 and written[0] is args[0]:
            return written[0]  # changed in place, its shape stays
        if written or torch.Tag.nondeterministic_seeded in func.tags:
            raise ConfigError(
                f"Inside of tk.train.on_meta {func} was called for a parameter without memory, where it cannot run. "
                "Build the module that calls it outside of on_meta."
            ) from None
        return NotImplemented


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
