"""Parameters of ZeRO stage 3 while their values are spread over the ranks: they have a shape, but no values.

The parameter object stays the same, in modules and in autograd. Two things of it change. Its class becomes
`AbsentParameter`, which raises an error with the parameter's name if Python reads values. Its data becomes one NaN,
expanded to the parameter's shape: native code that reads past Python finds valid memory, and no number in it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from ...core.errors import TkError
from .trained_parameter import TrainedParameter

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


class AbsentParameter(TrainedParameter):
    """The class of a parameter whose values are spread over the ranks."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] = MappingProxyType({}),  # type: ignore[assignment]
    ) -> Any:
        """Called by torch for every function, method and property that is used on the parameter from Python.

        Raises:
            TkError: the function would read or write values.
        """
        if function in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        absent = next(_absent((*args, *kwargs.values())))
        # For a property, `function` is a method of its descriptor, which has the property's name.
        name = getattr(getattr(function, "__self__", function), "__name__", "a function")
        raise TkError(
            f"The values of {absent.fqn} are spread over the ranks (ZeRO stage 3). They are on this rank only while "
            f"the part of the model that holds the parameter computes; {name} was called outside of that. Read the "
            "parameter inside `with engine.full_parameters():`, or use `engine.state_dict()`; every rank must do it. "
            "If another part of the model reads the parameter in its forward pass, name the parameter's block in "
            "initialize(..., gather_together=[...])."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.fqn}: parameter of shape {tuple(self.shape)}, {self.dtype}, spread over the ranks"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _absent(values: Iterable[Any]) -> Iterator[AbsentParameter]:
    """Yields the absent parameters among arguments of a function, within tuples and lists too."""
    for value in values:
        if isinstance(value, AbsentParameter):
            yield value
        elif isinstance(value, tuple | list):
            yield from _absent(value)


class Presence:
    """Removes the values of a bucket's parameters and restores them.

    Args:
        parameters: the module's parameters.
        names: their names in the module.
        places: their views of the bucket's memory.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], names: Sequence[str], places: Sequence[torch.Tensor]
    ) -> None:
        for parameter, name in zip(parameters, names, strict=True):
            parameter.fqn = name  # type: ignore[attr-defined]
        nan = [torch.full((), torch.nan, dtype=place.dtype, device=place.device) for place in places[:1]]
        self._restored = True
        self._present = [(p, place, type(p)) for p, place in zip(parameters, places, strict=True)]
        self._absent = [(p, nan[0].expand(place.shape)) for p, place in zip(parameters, places, strict=True)]

    def remove(self) -> None:
        """Removes the values: reading one from Python raises a TkError, until `restore`."""
        if not self._restored:
            return
        self._restored = False
        for parameter, nan in self._absent:
            parameter.data = nan
            parameter.__class__ = AbsentParameter

    def restore(self) -> None:
        """Makes the parameters views of the bucket's memory again, once their values are gathered there."""
        self._restored = True
        for parameter, place, kind in self._present:
            parameter.__class__ = kind  # first: AbsentParameter refuses the assignment of `data`
            parameter.data = place
