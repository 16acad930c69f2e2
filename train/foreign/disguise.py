"""Parameters without memory say that they are on the CPU, as in an ordinary construction, while modules are built.

Code asks a parameter for its device to make a buffer beside it, and torch's initialisers leave out what is on meta.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ...core.errors import ConfigError
from .construction_log import ConstructionLog

_ANSWERS: Final[dict[Any, object]] = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.get_device: -1,
}
_FROM_PYTHON: Final = (torch.tensor, torch.as_tensor, torch.asarray)
_SHARING: Final = (torch.Tensor.numpy, torch.Tensor.__array__)


class Disguise(TorchFunctionMode):
    """Answers for tensors of one log.

    Args:
        log: the log.
        newest: returns the name of the parameter that was registered last, for messages.
    """

    def __init__(self, log: ConstructionLog, newest: Callable[[], str]) -> None:
        super().__init__()
        self._log = log
        self._newest = newest

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
                    f"it of one or of what it computed from one ({self._newest()} was registered last). Build that "
                    "module outside of on_meta."
                )
            self._log.share_with_numpy(args[0])
        if function is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            # Torch would put the number into a tensor on the meta device, which forgets it.
            args = (*args[:2], torch.full((1,), args[2], dtype=args[0].dtype))
        keywords = dict(kwargs or {})
        if function in _FROM_PYTHON and torch.device(keywords.get("device") or "cpu").type == "meta":
            return function(*args, **keywords | {"device": "cpu"}).to("meta")
        return function(*args, **keywords)
