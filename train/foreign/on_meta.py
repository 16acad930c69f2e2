"""`on_meta`: modules are built without memory for their parameters, with everything else as always.

with tk.train.on_meta():
    model = AutoModelForCausalLM.from_config(config)
engine = initialize(model, zero=3, weights="folder")    # or without weights: the values of an ordinary construction
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

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
    construction = Construction()
    with ExitStack() as stack:
        stack.callback(construction.end)
        try:
            with construction, Disguise(construction):
                yield
        except (RuntimeError, TypeError) as error:
            if "meta" in str(error):
                error.add_note(
                    "Inside of tk.train.on_meta parameters have no memory, and this code takes the memory of one "
                    f"({construction.newest} was registered last). Build the module that does it outside of on_meta."
                )
            raise


def builds_on_meta() -> bool:
    """Returns whether this thread is inside of a block of `on_meta`."""
    return _construction() is not None


def _construction() -> Construction | None:
    """Returns the construction of this thread."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Construction)), None)


def _on_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    construction = _construction()
    if construction is not None and parameter is not None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            construction.register_parameter(f"{type(module).__name__}.{name}", parameter)


def _on_buffer(module: nn.Module, name: str, buffer: Any) -> torch.Tensor | None:
    construction = _construction()
    if construction is None or buffer is None:
        return None
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return construction.register_buffer(f"{type(module).__name__}.{name}", buffer)


# Hooks are those of all threads, and no thread may build a module while another adds one. So they are added once;
# outside of blocks they do nothing.
register_module_parameter_registration_hook(_on_parameter)
_BUFFER_HOOK: Final[Any] = _on_buffer  # it may return another tensor, which torch's annotation leaves out
register_module_buffer_registration_hook(_BUFFER_HOOK)
