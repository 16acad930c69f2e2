"""The record of all operations by which modules are built under `on_meta`: from it a parameter's first values are made.

A tensor is recorded as a part of a slot, the memory that it lies in. Memory that does not exist (the meta device) and
memory that did exist for a while (the tensor that a parameter was made of) are slots alike. Views need no entry.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map_only

_ATTRIBUTE: Final = "construction_log"  # of the storages on the meta device that a log knows
_FILLS: Final = frozenset({"normal_", "uniform_", "zero_", "fill_", "exponential_", "copy_"})
_SHAPE_ONLY: Final = (
    "new_",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor as a part of a slot."""

    slot: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the tensor in a storage that stands for the slot."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    def blank(self, nbytes: int) -> torch.Tensor:
        """Returns the tensor in new memory with undefined values; the system gives pages when they are written."""
        return self.on(torch.UntypedStorage(nbytes))


@dataclass(slots=True, eq=False)
class Operation:
    """One call of an operator, with places for tensors.

    Attributes:
        index: its number in the log.
        function, args, kwargs: the call.
        reads: the slots whose values it reads.
        writes: the slots that it changes in place.
        results: the places of the tensors that it makes; None for one that is a view or an argument.
        overwrites: whether it gives the one slot that it writes new values throughout, from no old one.
        generator: the generator that it draws from; None if it draws nothing.
        default_dtype: torch's default dtype at the time.
        start: the generator's state before it, or the operation that drew before it from the same generator.
        end: the generator's state after it, once it is known.
    """

    index: int
    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[Place | None, ...] = ()
    overwrites: bool = False
    generator: torch.Generator | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    start: "torch.Tensor | Operation | None" = None
    end: torch.Tensor | None = field(default=None)

    @property
    def touched(self) -> frozenset[int]:
        """The slots that it changes or makes."""
        return self.writes | {place.slot for place in self.results if place}


class ConstructionLog:
    """The operations of one block of `on_meta`, and the slots of all memory that they saw."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # bytes by slot
        self.constants: dict[
            int, torch.UntypedStorage
        ] = {}  # slots that were there before the block, with their values
        self._open: set[int] = set()  # slots that numpy may write unseen
        self._operations: list[Operation] = []
        self._changes: list[list[Operation]] = []  # by slot
        self._absent: set[int] = set()  # slots of memory on the meta device
        self._slots: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps the address from another use

    @staticmethod
    def of(tensor: torch.Tensor) -> "ConstructionLog | None":
        """Returns the log from which a tensor on the meta device can be made; None if there is none."""
        log: ConstructionLog | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
        return log

    def knows(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor's memory has a slot."""
        return tensor.untyped_storage()._cdata in self._slots

    def place(self, tensor: torch.Tensor) -> Place:
        """Returns a tensor's place; memory from outside of the block gets a slot with its present values."""
        storage = tensor.untyped_storage()
        known = self._slots.get(storage._cdata)
        if known is None:
            slot = self.add_slot(storage)
            self.constants[slot] = storage
        else:
            slot = known[1]
        return Place(slot, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def add_slot(self, storage: torch.UntypedStorage) -> int:
        """Returns a new slot for new memory."""
        self.sizes.append(storage.nbytes())
        self._changes.append([])
        self.share_slot(storage, len(self.sizes) - 1)
        return len(self.sizes) - 1

    def share_slot(self, storage: torch.UntypedStorage, slot: int) -> None:
        """Makes a storage stand for a slot, too."""
        self._slots[storage._cdata] = (StorageWeakRef(storage), slot)
        if storage.device.type == "meta":
            self._absent.add(slot)
            setattr(storage, _ATTRIBUTE, self)

    def share_with_numpy(self, tensor: torch.Tensor) -> None:
        """Notes that numpy gets a tensor's memory."""
        self._open.add(self.place(tensor).slot)

    def settle(self, tensor: torch.Tensor) -> Place:
        """Returns the place of a tensor that is about to lose its memory; what numpy may have written is kept."""
        place = self.place(tensor)
        if place.slot not in self._open:
            return place
        storage = tensor.untyped_storage()
        self.constants[self.add_slot(storage)] = storage.clone()
        return self.place(tensor)

    def close(self) -> None:
        """Called at the end of the block: keeps a copy of outside values on which tensors without memory depend."""
        absent = {slot for reference, slot in self._slots.values() if slot in self._absent and not reference.expired()}
        read = {slot for each in self.needed(frozenset(absent), self.length) for slot in each.reads} | absent
        read |= {slot for each in self._operations if each.generator for slot in each.reads}
        self.constants = {slot: storage.clone() for slot, storage in self.constants.items() if slot in read}

    def operation(self, function: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Operation:
        """Describes a call that is about to run; `written` are the tensors that it changes."""
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        writes = {self.place(tensor).slot for tensor in written}
        for slot in writes & self.constants.keys():  # its values from before the block are lost otherwise
            self.constants[slot] = self.constants[slot].clone()
        name = function._schema.name.removeprefix("aten::")
        reads = set() if name.startswith(_SHAPE_ONLY) else {self.place(tensor).slot for tensor in tensors}
        at, keywords = tree_map_only(torch.Tensor, self.place, (args, kwargs))
        made = Operation(len(self._operations), function, at, keywords, frozenset(reads), frozenset(writes))
        if name in _FILLS and len(written) == 1 and written[0] is args[0]:
            whole = written[0].numel() * written[0].element_size() == self.sizes[min(writes)]
            source = {self.place(tensor).slot for tensor in tensors[1:]}
            made.overwrites = whole and written[0].is_contiguous() and not source & writes
        return made

    def append(self, operation: Operation, results: Any) -> None:
        """Enters a call that has run; a view of known memory, which computes nothing, needs no entry."""
        places: list[Place | None] = []
        for tensor in tree_flatten(results)[0]:
            if isinstance(tensor, torch.Tensor):
                known = self.knows(tensor)
                if not known:
                    self.add_slot(tensor.untyped_storage())
                places.append(None if known else self.place(tensor))
        operation.results = tuple(places)
        if operation.touched or operation.generator is not None:
            operation.index = len(self._operations)
            self._operations.append(operation)
            for slot in operation.touched:
                self._changes[slot].append(operation)

    def needed(self, slots: frozenset[int], before: int) -> list[Operation]:
        """Returns the operations, in order, on which the values of slots before operation number `before` depend."""
        found: dict[int, Operation] = {}
        waiting = [(slot, before) for slot in slots]
        while waiting:
            slot, limit = waiting.pop()
            for operation in self._last_changes(slot, limit):
                if operation.index in found:  # and so are the changes before it
                    break
                found[operation.index] = operation
                sources = operation.reads if operation.overwrites else operation.reads | operation.writes
                own = operation.writes if operation.overwrites else frozenset()
                waiting += [(source, operation.index) for source in sources - own]
        return [found[index] for index in sorted(found)]

    def _last_changes(self, slot: int, limit: int) -> Iterator[Operation]:
        """Yields a slot's changes before a limit, the last first, back to one that gives it new values throughout."""
        for operation in reversed(self._changes[slot]):
            if operation.index < limit:
                yield operation
                if operation.overwrites:
                    return

    @property
    def length(self) -> int:
        """The number of operations."""
        return len(self._operations)
