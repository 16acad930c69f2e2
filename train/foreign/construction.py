"""The operators that run while modules are built under `on_meta`: each is recorded, and those of parameters not run.

Random numbers for tensors without memory are not drawn. Until another tensor needs numbers of the same generator, or a
value depends on them, the generator is left with a seed of ours, which marks the place; a seed or state that the code
sets meanwhile is thereby noticed.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ...core.errors import ConfigError
from .construction_log import ConstructionLog, Operation
from .replay import state_after, value_of

_MARK: Final = 0x746B_6D65_7461_0000  # + a number: the seed that stands for numbers not drawn yet
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


class Construction(TorchDispatchMode):
    """Runs operators on real memory as always, and those on tensors without memory for their shapes alone.

    Attributes:
        log: the operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = ConstructionLog()
        self._drawn_last: dict[int, Operation] = {}  # by the mark in the generator
        self._generators: list[torch.Generator] = []
        self._stale: set[int] = set()  # slots with values that memory of theirs lacks

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator."""
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        foreign = [t for t in tensors if t.layout != torch.strided or (t.is_meta and not self.log.knows(t))]
        if foreign or func._schema.name in _MOVED:
            if any(tensor.is_meta and self.log.knows(tensor) for tensor in tensors) and foreign:
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
        absent = to_meta or any(tensor.is_meta for tensor in tensors)
        real = not absent or _needs_values(func, kwargs) or any(not tensor.is_meta for tensor in written)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._begin_draw(operation, real)
        if real:
            args, kwargs = tree_map_only(torch.Tensor, self._present, (args, kwargs))
            results = func(*args, **kwargs)
            if operation.generator is not None:
                operation.end = operation.generator.get_state()
        else:
            results = _shapes_of(func, args, kwargs, written)
            self._stale |= operation.writes
        self.log.append(operation, results)
        return results

    def make_absent(self, parameter: torch.nn.Parameter) -> None:
        """Takes a parameter's memory away; the object stays the same, for all who hold it."""
        place = self.log.settle(parameter)
        storage = torch.UntypedStorage(self.log.sizes[place.slot], device="meta")
        self.log.share_slot(storage, place.slot)
        twin = torch.Tensor._make_subclass(type(parameter), place.on(storage), parameter.requires_grad)
        vars(twin).update(vars(parameter))
        torch.utils.swap_tensors(parameter, twin)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without memory with its values, as other memory of the same slot."""
        made = value_of(self.log, tensor)
        self.log.share_slot(made.untyped_storage(), self.log.place(tensor).slot)
        return made

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
            mark = _MARK + len(self._drawn_last)
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
    arguments = func._schema.arguments
    named = zip(arguments, args, strict=False)
    values = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
    changing = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    return _tensors([*values, *(value for name, value in kwargs.items() if name in changing)])


def _needs_values(func: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether an operator gives back values, in Python or on a real device."""
    device = kwargs.get("device")
    return func._schema.name in _READ or (device is not None and torch.device(device).type != "meta")


def _shapes_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[torch.Tensor]) -> Any:
    """Runs an operator on the meta device."""
    args, kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        if len(written) != 1 or written[0] is not args[0]:
            raise
        return written[0]  # changed in place, its shape stays


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
