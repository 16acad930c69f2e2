"""A module's persistent buffers over data-parallel ranks: state that forward changes, and that has no gradient.

Ranks compute different data, so running statistics drift apart. After every step all ranks get the same values: the
mean over ranks (in fp64) of floating-point buffers, rank 0's values of others. Buffers with persistent=False differ.
"""

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.tensors import Table
from ...parallel.collectives import all_reduce, broadcast
from ...parallel.mesh import Group
from ...parallel.torch_dtypes import format_of, has_format


class PersistentBuffers:
    """The buffers that are in a module's `state_dict`, with the values that forward left.

    Args:
        table: the module's tensors.
        world: the ranks that train it.
    """

    def __init__(self, module: nn.Module, table: Table, world: Group) -> None:
        self.module = module
        self.world = world
        names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self.specs = tuple(spec for spec in table if spec.name in names and not spec.alias)
        self._agreed = torch.empty(0, dtype=torch.uint8)
        self.agree()

    def now(self) -> list[torch.Tensor]:
        """Returns the buffers' values, in the table's order.

        Raises:
            ConfigError: a buffer has another shape or dtype than at the start.
        """
        return [self._checked(spec.name, spec.shape, spec.dtype) for spec in self.specs]

    def changed(self, device: torch.device) -> torch.Tensor:
        """Returns 1 if this rank's values differ from those of the last `agree`, else 0; fp64. Raises as `now`."""
        now = self.now()
        if self.world.size == 1 or not now:
            return torch.zeros((), dtype=torch.float64, device=device)
        return (_as_bytes(now) != self._agreed).any().double()

    @torch.no_grad()
    def agree(self) -> None:
        """Gives all ranks the same values; every rank calls it. Raises as `now`."""
        values = self.now()
        if self.world.size == 1 or not values:
            return
        floats = [tensor for tensor in values if tensor.is_floating_point()]
        if floats:
            flat = torch.cat([tensor.reshape(-1).double() for tensor in floats])
            means = all_reduce(flat, self.world) / self.world.size
            for tensor, mean in zip(floats, means.split([tensor.numel() for tensor in floats]), strict=True):
                _write(tensor, mean)
        others = [tensor for tensor in values if not tensor.is_floating_point()]
        if others:
            flat = broadcast(_as_bytes(others), self.world)
            sizes = [tensor.numel() * tensor.element_size() for tensor in others]
            for tensor, part in zip(others, flat.split(sizes), strict=True):
                _write(tensor, part.clone().view(tensor.dtype))  # a clone's memory is aligned
        self._agreed = _as_bytes(values)

    def _checked(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        owner, _, last = name.rpartition(".")
        tensor = self.module.get_submodule(owner)._buffers.get(last)
        if tensor is None:
            raise ConfigError(
                f"The buffer {name} was removed after initialize: a checkpoint has every tensor that the module had "
                "then. Keep the buffer, or register it with persistent=False before initialize."
            )
        if tuple(tensor.shape) != shape or not has_format(tensor.dtype) or format_of(tensor.dtype).code != dtype:
            raise ConfigError(
                f"The buffer {name} was {dtype} {list(shape)} when initialize saw it and is {tensor.dtype} "
                f"{list(tensor.shape)} now: a checkpoint's tensors keep their shape and dtype. Give it its final ones "
                "before, or register it with persistent=False."
            )
        return tensor


def _as_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of all tensors, concatenated; 1-D uint8."""
    return torch.cat([tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values in place; if elements share memory (an expanded buffer), they get memory of their own first."""
    tensor.data = tensor.data.contiguous()
    tensor.data.view(-1).copy_(values.reshape(-1))
