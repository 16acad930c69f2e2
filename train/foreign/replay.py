"""First values from a construction log: the operations on which a tensor depends run again, for that tensor alone.

Random numbers are those of an ordinary construction: each operation draws from the state that its generator had.
"""

from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ...core.process import return_freed_memory
from .construction_log import ConstructionLog, Operation, Place

LARGE: Final = 2**20  # bytes; freed memory of this size is returned to the system
Memory = dict[int, torch.UntypedStorage]


@torch.no_grad()
def value_of(log: ConstructionLog, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's present values, in memory of its own.

    At most the tensor, and what one operation of its own reads and makes, is in memory at a time.
    """
    place = log.place(tensor)
    memory = _run(log, frozenset({place.slot}), log.length)
    return place.on(_storage(log, place, memory))


def state_after(log: ConstructionLog, operation: Operation) -> torch.Tensor:
    """Returns the state of an operation's generator after it; draws what was not drawn up to there."""
    chain: list[Operation] = []
    at: Operation | torch.Tensor | None = operation
    while isinstance(at, Operation) and at.end is None:
        chain.append(at)
        at = at.start
    for earlier in reversed(chain):
        _draw(log, earlier)
    assert operation.end is not None
    return operation.end


def _draw(log: ConstructionLog, operation: Operation) -> None:
    """Draws an operation's numbers and forgets them: only the generator's state after it is of use."""
    values = operation.reads - operation.writes  # where those say how much is drawn
    _call(log, operation, _run(log, values, operation.index))
    if any(log.sizes[slot] >= LARGE for slot in operation.touched):
        return_freed_memory()


def _run(log: ConstructionLog, slots: frozenset[int], before: int) -> Memory:
    """Returns memory with the values of slots before operation number `before`."""
    memory: Memory = {}
    operations = log.needed(slots, before)
    last = {slot: each.index for each in operations for slot in each.reads | each.touched}
    for operation in operations:
        _call(log, operation, memory)
        for slot in operation.reads | operation.touched:
            if last[slot] == operation.index and slot not in slots:
                memory.pop(slot, None)
    return memory


def _call(log: ConstructionLog, operation: Operation, memory: Memory) -> None:
    args, kwargs = tree_map_only(
        Place, lambda place: place.on(_storage(log, place, memory)), (operation.args, operation.kwargs)
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(operation.default_dtype)
    try:
        results = _drawing(log, operation, args, kwargs) if operation.generator else operation.function(*args, **kwargs)
    finally:
        torch.set_default_dtype(default)
    tensors = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, torch.Tensor)]
    for tensor, place in zip(tensors, operation.results, strict=True):
        if place:
            memory[place.slot] = _laid_out(tensor, place, log.sizes[place.slot])


def _drawing(log: ConstructionLog, operation: Operation, args: Any, kwargs: Any) -> Any:
    """Calls an operation with its generator in the state that it had, which is put back afterwards."""
    start, generator = operation.start, operation.generator
    assert generator is not None
    assert start is not None
    state = state_after(log, start) if isinstance(start, Operation) else start
    present = generator.get_state()
    generator.set_state(state)
    try:
        results = operation.function(*args, **kwargs)
        operation.end = generator.get_state()
    finally:
        generator.set_state(present)
    return results


def _storage(log: ConstructionLog, place: Place, memory: Memory) -> torch.UntypedStorage:
    """Returns the memory of a slot; new with undefined values, or the constant's, if there is none yet."""
    if place.slot not in memory:
        constant = log.constants.get(place.slot)
        memory[place.slot] = torch.UntypedStorage(log.sizes[place.slot]) if constant is None else constant.clone()
    return memory[place.slot]


def _laid_out(tensor: torch.Tensor, place: Place, nbytes: int) -> torch.UntypedStorage:
    """Returns a result's storage, laid out as recorded: without memory torch may have foreseen other strides."""
    found = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    if found == (place.shape, place.stride, place.offset):
        return tensor.untyped_storage()
    return place.blank(nbytes).copy_(tensor).untyped_storage()
