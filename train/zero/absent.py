"""Parameters of ZeRO stage 3 while their values are spread over the ranks: shapes can be asked for, values cannot.

The object stays the same, in modules and in autograd. What changes is its class, which refuses by name whatever Python
would read, and its data, a single NaN seen in the parameter's shape: memory that is there for whatever Python does not
see.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from ...core.errors import TkError

_PROPERTIES: Final = (
    *(
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "itemsize",
        "nbytes",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
    ),
    *("is_cpu", "is_cuda", "is_meta", "is_nested", "is_sparse", "is_quantized", "output_nr", "retains_grad"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS: Final = (
    *("size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex", "__len__"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "get_device"),
)
_ALLOWED: Final = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [vars(torch._C.TensorBase)["grad"].__delete__]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.numel]
    + [torch.autograd.backward]  # a leaf's: only adds to its gradient, as weight gradients that were put off do
)


class AbsentParameter(nn.Parameter):
    """The class of a parameter meanwhile.

    Attributes:
        fqn: its name in the module.
    """

    fqn: str

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] = MappingProxyType({}),  # type: ignore[assignment]
    ) -> Any:
        """Everything that torch does with it in Python comes here.

        Raises:
            TkError: it would read or write values.
        """
        if function in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        absent = next(_absent((*args, *kwargs.values())))
        name = getattr(getattr(function, "__self__", function), "__name__", "a function")  # a property's, or its own
        raise TkError(
            f"The values of {absent.fqn} are spread over the ranks (ZeRO stage 3) and here only while the part of the "
            f"model that holds it computes; {name} was called outside of that. Read it inside `with "
            "engine.full_parameters():`, or take `engine.state_dict()`; both on every rank. If another part of the "
            "model reads it in its forward pass, name its block in initialize(..., gather_together=[...])."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.fqn}: parameter of shape {tuple(self.shape)}, {self.dtype}, spread over the ranks"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _absent(values: Iterable[Any]) -> Iterator[AbsentParameter]:
    for value in values:
        if isinstance(value, AbsentParameter):
            yield value
        elif isinstance(value, tuple | list):
            yield from _absent(value)


class Presence:
    """Takes a bucket's parameters away and brings them back.

    Args:
        places: where each parameter lies in the bucket's memory.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], names: Sequence[str], places: Sequence[torch.Tensor]
    ) -> None:
        for parameter, name in zip(parameters, names, strict=True):
            parameter.fqn = name  # type: ignore[attr-defined]
        nothing = [torch.full((), torch.nan, dtype=place.dtype, device=place.device) for place in places[:1]]
        self._here = True
        self._present = [(p, place, type(p)) for p, place in zip(parameters, places, strict=True)]
        self._absent = [(p, nothing[0].expand(place.shape)) for p, place in zip(parameters, places, strict=True)]

    def end(self) -> None:
        """From here on the values cannot be read."""
        if not self._here:
            return
        self._here = False
        for parameter, nothing in self._absent:
            parameter.data = nothing
            parameter.__class__ = AbsentParameter

    def begin(self) -> None:
        """The values are in their places."""
        self._here = True
        for parameter, place, kind in self._present:
            parameter.__class__ = kind
            parameter.data = place
