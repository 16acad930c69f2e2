"""The class of parameters that an engine trains: their gradients are in the engine's buffers, not in `.grad`.

A user who reads `.grad` between backward and step (clip_grad_norm_, gradient surgery, an optimizer of torch) would find
nothing and change nothing without a word. So that access is an error with the parameter's name.
"""

import weakref
from typing import Any, Final, Never, SupportsIndex

import torch
from torch import nn

from ...core.errors import ConfigError

_GRAD: Final = vars(torch._C.TensorBase)["grad"]  # autograd's own, which is beneath the property of a class


def autograd_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient where autograd accumulates it."""
    grad: torch.Tensor | None = _GRAD.__get__(parameter)
    return grad


def set_autograd_grad(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Sets the tensor that autograd accumulates the parameter's gradient into."""
    _GRAD.__set__(parameter, grad)


class GradientState:
    """Whether an engine holds gradients of its parameters.

    Attributes:
        pending: whether a backward pass has given gradients that no step has applied or discarded.
    """

    __slots__ = ("__weakref__", "pending")

    def __init__(self) -> None:
        self.pending = False


class TrainedParameter(nn.Parameter):
    """A parameter of a module that was given to `initialize`.

    `copy.deepcopy` and pickle make plain parameters of it, which belong to no engine.

    Attributes:
        fqn: the parameter's name in the module.
        gradients: the state of the engine that trains it; a dead reference once the engine is gone.
    """

    fqn: str
    gradients: "weakref.ref[GradientState] | None" = None

    @property
    def grad(self) -> torch.Tensor | None:
        """None, as after `zero_grad`; an error while gradients are pending, since they are elsewhere."""
        state = self.gradients() if self.gradients else None
        if state and state.pending:
            self._refuse("read")
        return autograd_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        state = self.gradients() if self.gradients else None
        if state and (state.pending or value is not None):
            self._refuse("set")
        set_autograd_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _refuse(self, verb: str) -> Never:
        raise ConfigError(
            f"{self.fqn}.grad was {verb}, but the engine keeps gradients in buffers of its own, spread over the ranks. "
            'To clip their norm: initialize(model, {"grad_clip": 1.0}); the norm of a step: engine.last_grad_norm; to '
            "discard them: engine.zero_grad(); to change single gradients: parameter.register_hook. "
            "Move or cast (to, half) the module before initialize."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
