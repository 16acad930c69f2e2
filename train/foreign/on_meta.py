"""`on_meta`: modules are built without memory for their parameters, with everything else as always.

with tk.train.on_meta():
    model = AutoModelForCausalLM.from_config(config)
engine = initialize(model, zero=3, weights="folder")    # or without weights: the values of an ordinary construction
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ...core.errors import ConfigError
from .construction import Construction
from .disguise import Disguise


@contextmanager
def on_meta() -> Iterator[None]:
    """Leaves the parameters of modules that this thread builds inside the block without memory (the meta device).

    Buffers, and tensors that are neither, get their values as always, bit for bit, also those that are random or
    computed from a parameter: its values are then made for a moment. `initialize` makes the values of parameters, those
    of an ordinary construction.

    A parameter loses its memory when a module registers it. An initialiser may have written it before, so that at most
    one parameter has memory at a time; the layers of torch and `transformers` register first.

    Random numbers for parameters are drawn only if a buffer needs later ones of the same generator. After the block the
    generator may therefore stand elsewhere than after an ordinary construction.

    Blocks may be nested: the outermost counts.

    Raises:
        ConfigError: a module has parameters whose shape is not known yet, or a buffer in a parameter's memory.
    """
    if builds_on_meta():
        yield
        return
    hooks = _Hooks(Construction(), threading.get_ident())
    with ExitStack() as stack:
        stack.callback(hooks.construction.end)
        stack.callback(register_module_parameter_registration_hook(hooks.parameter).remove)
        buffer_hook: Any = hooks.buffer  # it may return another tensor, which torch's annotation leaves out
        stack.callback(register_module_buffer_registration_hook(buffer_hook).remove)
        try:
            with hooks.construction, Disguise(hooks.construction.log, lambda: hooks.newest):
                yield
        except (RuntimeError, TypeError) as error:
            if "meta" in str(error):
                error.add_note(
                    "Inside of tk.train.on_meta parameters have no memory, and this code takes the memory of one "
                    f"({hooks.newest} was registered last). Build the module that does it outside of on_meta."
                )
            raise


def builds_on_meta() -> bool:
    """Returns whether this thread is inside of a block of `on_meta`."""
    return any(isinstance(mode, Construction) for mode in _get_current_dispatch_mode_stack())


class _Hooks:
    """What happens when a module registers a parameter or a buffer.

    Attributes:
        newest: the parameter that was registered last, for messages.
    """

    def __init__(self, construction: Construction, thread: int) -> None:
        self.construction = construction
        self.newest = "no parameter"
        self._thread = thread
        self._owners: dict[int, str] = {}  # by slot

    def parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        if threading.get_ident() != self._thread or parameter is None:
            return
        self.newest = f"{type(module).__name__}.{name}"
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._parameter(parameter)

    def _parameter(self, parameter: nn.Parameter) -> None:
        log = self.construction.log
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"{self.newest} has no shape before a first batch, so it cannot be built under tk.train.on_meta. Give "
                "the layer its sizes, or build the module outside of on_meta and run a batch through it."
            )
        if parameter.layout != torch.strided or (parameter.is_meta and not log.knows(parameter)):
            return
        if not parameter.is_meta:
            self.construction.make_absent(parameter)
        self._owners[log.place(parameter).slot] = self.newest

    def buffer(self, module: nn.Module, name: str, buffer: Any) -> torch.Tensor | None:
        if threading.get_ident() != self._thread or buffer is None:
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self._buffer(f"{type(module).__name__}.{name}", buffer)

    def _buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor | None:
        log = self.construction.log
        if buffer.layout != torch.strided or not log.knows(buffer):
            return None
        owner = self._owners.get(log.place(buffer).slot)
        if owner:
            raise ConfigError(
                f"The buffer {name} lies in the memory of the parameter {owner}: training would part them. Clone one "
                "of them."
            )
        return self.construction.value(buffer) if buffer.is_meta else None
