"""Parameters without memory say that they are on the CPU, as in an ordinary construction, while modules are built.

Code asks a parameter for its device to make a buffer beside it, and torch's initialisers leave out what is on meta.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ...core.errors import ConfigError
from .construction import Construction

_ANSWERS: Final[dict[Any, object]] = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.get_device: -1,
}
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SHARING: Final = (torch.Tensor.numpy, torch.Tensor.__array__)


class Disguise(TorchFunctionMode):
    """Answers for tensors of one construction."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction
        self._log = construction.log

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = MappingProxyType({}),  # type: ignore[assignment]
    ) -> Any:
        """Called by torch for every function, method and property that is used from Python."""
        if function in _ANSWERS and args[0].is_meta and self._log.knows(args[0]):
            return _ANSWERS[function]
        if function in _SHARING and args[0].layout == torch.strided:
            if args[0].is_meta and self._log.knows(args[0]):
                raise ConfigError(
                    "Inside of tk.train.on_meta parameters have no memory that numpy could share, and a module takes "
                    "it of one or of what it computed from one. Build that module outside of on_meta "
                    f"({self._construction.newest} was registered last)."
                )
            self._log.share_with_numpy(args[0])
        if function == _SET_DATA and args[0].is_meta and self._log.knows(args[0]) and not args[1].is_meta:
            with _disable_current_modes():
                args = (args[0], self._construction.absent(args[1]))
        if function is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            # Torch would put the number into a tensor on the meta device, which forgets it.
            args = (*args[:2], torch.full((1,), args[2], dtype=args[0].dtype))
        keywords = dict(kwargs or {})
        self._construction.autocast = torch.is_autocast_enabled("cpu")
        self._construction.asked_for_meta = _asks_for_meta(function, args, keywords)
        try:
            return function(*args, **keywords)
        finally:
            self._construction.asked_for_meta = self._construction.autocast = False


def _asks_for_meta(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    asked = [keywords.get("device"), *(args[1:] if function is torch.Tensor.to else ())]
    return any(isinstance(value, str | torch.device) and torch.device(value).type == "meta" for value in asked)
