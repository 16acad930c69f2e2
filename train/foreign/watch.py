"""The check that a module is unchanged since `initialize`: a change would not be trained, or not be saved."""

from torch import nn

from ...checkpoint.read.reader import Checkpoint
from ...core.dtypes import COMPUTE_DTYPES
from ...core.errors import ConfigError, ShapeMismatch
from ...core.tensors import Table
from ..zero.flat_buffers import FlatBuffers

_AFTER = "after initialize, so that it would not be trained and saved as it is. Change the module first."
_SAME = "Load a checkpoint of the same module."
_FLOATS = frozenset(dtype.code for dtype in COMPUTE_DTYPES)


class ModuleWatch:
    """A module's parameters at the time of `initialize`, with their places in the flat buffers.

    Args:
        table: the module's tensors.
        buffers: the flat buffers that hold its parameters.
    """

    def __init__(self, module: nn.Module, table: Table, buffers: FlatBuffers) -> None:
        self.module = module
        self.table = table
        named = list(module.named_parameters(remove_duplicate=False))
        self._taken = {name: (parameter, parameter.requires_grad) for name, parameter in named}
        names = {id(parameter): name for name, parameter in reversed(named)}
        self._places = [
            (names[id(parameter)], parameter, place)
            for bucket in buffers.buckets
            if buffers.zero < 3  # at stage 3 parameters are not always in memory
            for parameter, place in zip(bucket.parameters, bucket.views(bucket.params), strict=True)
        ]

    def check(self) -> None:
        """Checks the module's parameters.

        Raises:
            ConfigError: a parameter was added, removed, replaced, moved, cast or frozen.
        """
        now = dict(self.module.named_parameters(remove_duplicate=False))
        for name, (parameter, learns) in self._taken.items():
            if now.pop(name, None) is not parameter:
                raise ConfigError(f"The parameter {name} was replaced or removed {_AFTER}")
            if parameter.requires_grad != learns:
                raise ConfigError(f"The parameter {name} was {'frozen' if learns else 'unfrozen'} {_AFTER}")
        for name in now:
            raise ConfigError(f"The parameter {name} was added {_AFTER}")
        for name, parameter, place in self._places:
            if parameter.dtype != place.dtype or not parameter.is_set_to(place):
                raise ConfigError(f"The parameter {name} was moved or cast (to, half, cuda, ...) {_AFTER}")

    def check_names(self) -> None:
        """Raises ConfigError if `state_dict` has a name that it did not have at the time of `initialize`."""
        known = {spec.param or spec.name for spec in self.table}
        for name in self.module.state_dict(keep_vars=True):
            if name not in known:
                raise ConfigError(f"The buffer {name} was added {_AFTER}")

    def check_stored(self, checkpoint: Checkpoint) -> None:
        """Raises ShapeMismatch unless a checkpoint has just the tensors that this module's have, integers alike."""
        stored = [spec for spec in self.table if spec.stored]
        extra = sorted(checkpoint.tensors.keys() - {spec.name for spec in stored})
        if extra:
            raise ShapeMismatch(f"{checkpoint.path} has {extra[0]}, which the module lacks. {_SAME}")
        for spec in stored:
            found = checkpoint.tensors.get(spec.name)
            if spec.alias:
                continue
            if found is None:
                raise ShapeMismatch(f"{checkpoint.path} lacks {spec.name}, which the module has. {_SAME}")
            if tuple(found.shape) != spec.shape:
                raise ShapeMismatch(
                    f"{checkpoint.path}: {spec.name} has shape {list(found.shape)}; the module's is "
                    f"{list(spec.shape)}. {_SAME}"
                )
            code = found.slots["weight"]
            if spec.dtype and code != spec.dtype and not {code, spec.dtype} <= _FLOATS:
                raise ShapeMismatch(
                    f"{checkpoint.path}: {spec.name} is {code}, and {spec.dtype} in the module. {_SAME}"
                )
