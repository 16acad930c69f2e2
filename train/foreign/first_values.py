"""The values with which parameters begin: those that they have, that `on_meta` left for later, or of a checkpoint."""

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.local_params import LocalParam
from ...core.process import return_freed_memory
from ...parallel.collectives import broadcast
from ...parallel.mesh import Group, Mesh
from .construction_log import ConstructionLog
from .replay import LARGE, value_of
from .stored_weights import StoredWeights


class FirstValues:
    """The values of a module's parameters, by name. Rank 0's count.

    Args:
        mesh: the groups of the ranks that train the module.
        stored: where the values come from, if not from the module.
    """

    def __init__(self, mesh: Mesh, stored: StoredWeights | None) -> None:
        self.stored = stored
        self._world = mesh.world
        self._shards_frozen = mesh.layout.zero == 3
        self._given: dict[str, torch.Tensor] = {}
        self._absent: dict[str, torch.Tensor] = {}

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Takes the values that a parameter has."""
        if self.stored:
            return
        self._given[name] = parameter.detach()
        broadcast_bytes(self._given[name], self._world)

    def take_absent(self, name: str, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
        """Takes a parameter of `on_meta`; one that stays whole gets its values now, others an engine's memory later.

        The object stays the same for all who hold it. It is no longer on the meta device, and refers to one element.
        """
        whole = not (parameter.requires_grad or (self._shards_frozen and dtype.is_floating_point))
        memory = torch.zeros(parameter.shape if whole else (), dtype=dtype, device=device)
        new = torch.Tensor._make_subclass(type(parameter), memory.expand(parameter.shape), parameter.requires_grad)
        torch._C._swap_tensor_impl(parameter, new)
        if not self.stored:
            self._absent[name] = new
            if whole:
                self.write(name, parameter.data)

    def fill(self, local: LocalParam, place: torch.Tensor) -> None:
        """Writes the values of a parameter into its place; see `write`."""
        self.write(local.name, place)

    @torch.no_grad()
    def write(self, name: str, place: torch.Tensor) -> None:
        """Writes a parameter's values, and forgets them; leaves those of a checkpoint for later. Every rank calls it.

        Those of `on_meta` are made by rank 0, for this parameter alone.

        Raises:
            ConfigError: fp16 cannot hold them.
        """
        if place.nbytes >= LARGE:
            return_freed_memory()  # of the bucket before, and of the parameter before
        if self.stored:
            return
        if name in self._given:
            place.copy_(self._given.pop(name))
            return
        absent = self._absent.pop(name)
        if self._world.rank == 0:
            place.copy_(_value(absent))
        broadcast_bytes(place, self._world)
        if place.dtype == torch.float16 and not place.isfinite().all():
            raise ConfigError(
                f"The parameter {name} begins with values beyond fp16's largest, {torch.finfo(place.dtype).max:g}; "
                "take bf16."
            )


def give_values(model: nn.Module, device: torch.device) -> None:
    """Gives values to tensors that modules computed from parameters under `on_meta`, and keep as plain attributes."""
    for module in model.modules():
        for name, tensor in list(vars(module).items()):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and ConstructionLog.of(tensor):
                setattr(module, name, _value(tensor).to(device))


def _value(tensor: torch.Tensor) -> torch.Tensor:
    log = ConstructionLog.of(tensor)
    assert log is not None
    return value_of(log, tensor)


def broadcast_bytes(tensor: torch.Tensor, world: Group) -> None:
    """Gives a contiguous tensor of any dtype rank 0's values."""
    broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor, world)
