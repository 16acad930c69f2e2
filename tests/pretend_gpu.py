"""A GPU that no machine needs: tensors that say they lie on another device, whose values are on the CPU.

Each operation runs on the values, and before it on fake tensors of torch with the same devices (FakeTensorMode), which
raise where a real GPU would: an operation on tensors of two devices. They also say where results lie. Only results
whose shape depends on values are unknown to them: those are checked and placed by the devices of the arguments.

The device is called "meta": a torch that is built for CPUs has guards for that one only, and none for "cuda".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU: Final = torch.device("meta")
_READS: Final = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__bool__,
        torch.Tensor.__index__,
    }
)
_MOVES: Final = (torch.ops.aten.copy_.default, torch.ops.aten.index_put_.default)  # take a tensor of the CPU, too
_DATA: Final = vars(torch._C.TensorBase)["data"]


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU.

    Attributes:
        held: the tensor on the CPU.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls: "type[OnGpu]", values: torch.Tensor) -> "OnGpu":
        """Wraps values."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=GPU,
        )
        made.held = values
        return made

    @property
    def data(self) -> Any:
        """The tensor outside of autograd."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        assert isinstance(other, OnGpu)
        self.held = other.held
        _DATA.__set__(self, other)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the memory, which the wrapper itself has not."""
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        """Returns the address, which the wrapper itself has not."""
        return self.held.data_ptr()

    def set_(self, *arguments: Any) -> "OnGpu":
        """Returns a tensor on a storage of the GPU."""
        with unset_fake_temporarily():
            return OnGpu(self.held.set_(*arguments))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Reads a number from the values: torch would ask for the driver."""
        if function in _READS:
            with unset_fake_temporarily():
                return function(arguments[0].held)
        return torch._C._disabled_torch_function_impl(function, types, arguments, keywords or {})

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Refuses operations outside of `pretend_gpu`."""
        raise AssertionError(f"{arguments[0]} runs outside of pretend_gpu")


class _Making(TorchFunctionMode):
    """Gives tensors that Python's numbers make their values: torch makes them on the device "meta" without any."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Calls a function."""
        keywords = keywords or {}
        if function is torch.tensor and keywords.get("device") == GPU:
            return torch.tensor(*arguments, **keywords | {"device": "cpu"}).to(GPU)
        return function(*arguments, **keywords)


class _Pretending(TorchDispatchMode):
    """Runs every operation on fake tensors and on values.

    Attributes:
        num_operations: how many had an argument or result on the GPU.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = fakes
        self._known: dict[tuple[Any, ...], list[torch.device]] = {}
        self.num_operations = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Runs an operation."""
        keywords = keywords or {}
        signature = (operation, *map(_kind, tree_leaves((arguments, keywords))))
        if signature not in self._known:
            self._known[signature] = self._devices(operation, arguments, keywords)
        devices = self._known[signature]
        plain = tree_map(_values, (arguments, keywords))
        with unset_fake_temporarily():
            result = operation(*plain[0], **plain[1])
        places = iter(devices if len({*devices}) > 1 else repeat(*{*devices})) if devices else iter(())
        given = {id(_values(each)): each for each in _tensors((arguments, keywords))}

        def placed(each: Any) -> Any:
            """Returns a result on its device: an argument itself, if the operation changed or returned it."""
            if not isinstance(each, torch.Tensor):
                return each
            device, own = next(places), given.get(id(each))
            if own is not None and own.device == device:
                return own
            with unset_fake_temporarily():
                values = each if own is None else each.clone()  # on its way from one device to the other
                return OnGpu(values) if device == GPU else values

        self.num_operations += GPU in devices
        return tree_map(placed, result)

    def _devices(self, operation: Any, arguments: Any, keywords: Any) -> list[torch.device]:
        """Returns the devices of the resulting tensors; raises what torch raises for a mix of devices."""
        try:
            fake_arguments, fake_keywords = tree_map(self._fake, (arguments, keywords))
            found = operation(*fake_arguments, **fake_keywords)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return [_common_device(operation, arguments, keywords)] * 9
        if operation._schema.is_mutable and operation not in _MOVES:  # torch looks for a mix where it makes a result
            _common_device(operation, arguments, keywords)
        return [each.device for each in _tensors(found)]

    def _fake(self, each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        with unset_fake_temporarily():
            shape = torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")
        return FakeTensor(self.fakes, shape, each.device)


def _common_device(operation: Any, arguments: Any, keywords: Any) -> torch.device:
    """Returns the device of an operation's tensors; a scalar may lie on the CPU."""
    tensors = _tensors((arguments, keywords))
    given = {each.device for each in tensors if each.dim()} or {tensors[0].device}
    assert len(given) == 1, f"{operation} has tensors of {given}"
    return given.pop()


def _values(each: Any) -> Any:
    if isinstance(each, torch.device):
        return torch.device("cpu")
    return each.held if isinstance(each, OnGpu) else each


def _kind(each: Any) -> object:
    """Returns what the devices of an operation's results depend on."""
    if isinstance(each, torch.Tensor):
        return each.device, each.dim() == 0
    return each if isinstance(each, torch.device) else type(each)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


@contextmanager
def pretend_gpu() -> Iterator[_Pretending]:
    """A context in which the device GPU computes."""
    with FakeTensorMode() as fakes, _Pretending(fakes) as pretending, _Making():
        yield pretending
