"""A GPU that no machine needs: tensors that say they lie on another device, whose values are on the CPU.

Each operation runs on the values, and before it on fake tensors of torch with the same devices (FakeTensorMode), which
raise where a real GPU would: an operation on tensors of two devices. They also say where results lie. Only results
whose shape depends on values are unknown to them: those are checked and placed by the devices of the arguments.

What makes the host wait for the GPU is recorded with the function of tk that does it: numbers that are read, shapes
that depend on values, and copies that wait or are of memory that is not pinned.

The device is called "meta": a torch that is built for CPUs has guards for that one only, and none for "cuda".

Beside values, the GPU has CUDA's rules for the host (pretended_memory.py) and NCCL's for ranks (pretended_ranks.py):
addresses of its memory are none of the host's, so native code must not get them; and copies between GPU and host are
counted, those of memory that is not pinned refused if a test asks for that. Numbers, which have no dimension, may go
both ways. All threads that start meanwhile have the GPU, too.
"""

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import repeat
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tk.tests.pretended_attention import install as install_attention
from tk.tests.pretended_memory import PretendedMemory, PretendedStream
from tk.tests.pretended_ranks import PretendedRanks
from tk.tests.running_function import A_TEST, running_function
from tk.train.foreign import take_over
from tk.train.zero import saved_activations
from tk.train.zero.native_adamw import AdamWUpdate, NativeAdamW
from tk.train.zero.trained_parameter import TrainedParameter

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
_TO: Final = torch.ops.aten.to  # a copy that inference mode does not call by its other name
_COPIES: Final = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, _TO.dtype_layout, _TO.device)
_FILLS: Final = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default, torch.ops.aten.fill_.Scalar)
_PINS: Final = (torch.ops.aten.pin_memory.default, torch.ops.aten._pin_memory.default)
_EMPTY, _DETACH = torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default
_NOT_OF_HOST: Final = 1 << 62  # in every address of the GPU's memory
_DATA: Final = vars(torch._C.TensorBase)["data"]


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU.

    Attributes:
        held: the tensor on the CPU.
        is_blank: whether it was made without values: then it may be one of a module that is built on torch's device of
            that name, to which memory is given later.
    """

    held: torch.Tensor
    is_blank = False

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
        """Returns an address of the GPU, which the wrapper itself has not."""
        return self.held.data_ptr() | _NOT_OF_HOST

    def is_set_to(self, other: torch.Tensor) -> bool:
        """Returns whether both are the same elements, which fake tensors do not know."""
        return isinstance(other, OnGpu) and self.held.is_set_to(other.held)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether it may be without memory, whatever the device is called."""
        return self.is_blank

    def set_(self, *arguments: Any) -> "OnGpu":
        """Returns a tensor on a storage of the GPU."""
        return OnGpu(self.held.set_(*arguments))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Reads a number from the values: torch would ask for the driver."""
        if function in _READS:
            return function(arguments[0].held)
        return torch._C._disabled_torch_function_impl(function, types, arguments, keywords or {})

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Refuses operations outside of `pretend_gpu`."""
        raise AssertionError(f"{arguments[0]} runs outside of pretend_gpu")


class TrainedOnGpu(OnGpu, TrainedParameter):
    """A parameter on the GPU that `initialize` has taken over."""


class _Making(TorchFunctionMode):
    """Answers for CUDA where torch would ask the driver, or make a tensor on the device "meta" without values."""

    def __init__(self, pretending: "_Pretending") -> None:
        super().__init__()
        self._pretending, self._memory = pretending, pretending.memory

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Calls a function."""
        arguments = tuple(map(_named, arguments))
        keywords = {name: _named(each) for name, each in (keywords or {}).items()}
        if function is torch.tensor and keywords.get("device") == GPU:
            self._pretending.waited("tensor copies Python's numbers")
            self._pretending.scalars.append(running_function())
            return OnGpu(torch.tensor(*arguments, **keywords | {"device": "cpu"}))  # the values are Python's numbers
        if function is torch.Tensor.is_pinned:
            return self._memory.is_pinned(*arguments)
        if function is torch.empty and keywords.pop("pin_memory", False):
            return self._memory.allocated(torch.empty(*arguments, **keywords))
        if function in _READS and isinstance(arguments[0], OnGpu):
            self._pretending.waited(f"reads {function.__name__}")
            self._memory.synchronize()
        return function(*arguments, **keywords)


class _Pretending(TorchDispatchMode):
    """Runs every operation of the GPU on fake tensors and on values.

    Attributes:
        memory: the host's memory, as CUDA sees it.
        num_operations: how many had an argument or result on the GPU.
        copies: those between the GPU and the host so far, "package/file.py function: to the GPU" or "to the host".
        pageable: the copies between the GPU and other memory.
        waits: what made the host wait for the GPU so far, "package/file.py function: why".
        scalars: the functions that made a tensor without dimensions there, of a number of the host.
    """

    def __init__(self, memory: PretendedMemory, ranks: PretendedRanks, allowed: Collection[str] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self._ranks, self._allowed = memory, ranks, allowed
        self._fakes, self._turn = FakeTensorMode(), threading.Lock()
        self._known: dict[tuple[Any, ...], list[torch.device]] = {}
        self.num_operations = 0
        self.copies: list[str] = []
        self.pageable: list[str] = []
        self.waits: list[str] = []
        self.scalars: list[str] = []
        self._reading: set[tuple[Any, ...]] = set()  # the signatures whose results have a shape that depends on values

    def waited(self, why: str) -> None:
        """Records a wait."""
        self.waits.append(f"{running_function()}: {why}")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch need not wrap what is called most, to hide it from torch.compile

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Runs an operation."""
        keywords = keywords or {}
        if operation in _PINS:
            return self.memory.pinned_copy(arguments[0])
        leaves = [*_leaves(arguments), *_leaves(keywords.values())]
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        on_gpu = [isinstance(each, OnGpu) for each in tensors]
        if not any(on_gpu) and GPU not in [each for each in leaves if isinstance(each, torch.device)]:
            if operation.namespace == "c10d":
                self._ranks.check(operation, arguments, on_gpu)
            return operation(*arguments, **keywords)
        plain = _plain(arguments), {name: _plain(each) for name, each in keywords.items()}
        if operation.namespace == "c10d":
            self._ranks.check(operation, arguments, on_gpu)
            return operation(*plain[0], **plain[1])
        signature = (operation, *map(_kind, leaves))
        if signature not in self._known:
            with self._turn, self._fakes:
                self._known[signature] = self._devices(operation, arguments, keywords, signature)
        if signature in self._reading:
            self.waited(f"{operation} has a result whose shape depends on values")
        devices = self._known[signature]
        places = {*on_gpu, *(device == GPU for device in devices)}
        if len(places) > 1 and operation in _COPIES:
            return self._copy(operation, arguments[0], plain, devices[0])
        self.num_operations += 1
        for each, is_there in zip(tensors, on_gpu, strict=True):
            if not is_there and each.dim():
                self._judge_pageable(f"{operation} takes memory of the host, {list(each.shape)},")
        result = operation(*plain[0], **plain[1])
        if operation in _FILLS and not result.dim():
            self.scalars.append(running_function())
        rest = iter(devices if len({*devices}) > 1 else repeat(*{*devices})) if devices else iter(())
        given = {id(_plain(each)): each for each in tensors}
        placed = tree_map(lambda each: _placed(each, rest, given), result)
        if operation is _EMPTY or (operation is _DETACH and tensors[0].is_meta):
            placed.is_blank = True
        return placed

    def _copy(self, operation: Any, first: torch.Tensor, plain: Any, device: torch.device) -> torch.Tensor:
        """Copies between the GPU and the host, and judges the memory of the host."""
        arguments, keywords = plain
        into = operation is torch.ops.aten.copy_.default
        waits = not (keywords.get("non_blocking") or (into and len(arguments) > 2 and arguments[2]))
        source = arguments[1] if into else arguments[0]
        if waits:
            self.memory.synchronize()
            self.waited(f"{operation} waits for its end")
        result = arguments[0] if into else operation(*arguments, **keywords).clone()
        host = result if device != GPU else source
        converts = result.dtype != source.dtype and waits
        if host.dim():
            if not (host.is_contiguous() and self.memory.is_pinned(host)) or converts:
                how = "converts on its way between the GPU and" if converts else "copies between the GPU and"
                self._judge_pageable(f"{operation} {how} memory of the host, {list(host.shape)},")
            self.copies.append(f"{running_function()}: to the {'host' if host is result else 'GPU'}")
        if (into and host is source) or waits:
            operation(*arguments, **keywords)
        if not waits and host is source:
            self.memory.start_read(host)
        elif not waits:
            self.memory.start_write(host, source)
        return first if into else OnGpu(result) if device == GPU else result

    def _judge_pageable(self, what: str) -> None:
        place = running_function()
        self.pageable.append(f"{place}: {what} that is not pinned")
        self.waited(f"{what} that is not pinned")
        assert self._allowed is None or place in (A_TEST, *self._allowed), self.pageable[-1]

    def _devices(self, operation: Any, arguments: Any, keywords: Any, signature: tuple[Any, ...]) -> list[torch.device]:
        """Returns the devices of the resulting tensors; raises what torch raises for a mix of devices."""
        try:
            fake_arguments, fake_keywords = tree_map(self._fake, (arguments, keywords))
            found = operation(*fake_arguments, **fake_keywords)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._reading.add(signature)
            return [_common_device(operation, arguments, keywords)] * 9
        if operation._schema.is_mutable and operation not in _MOVES:  # torch looks for a mix where it makes a result
            _common_device(operation, arguments, keywords)
        return [each.device for each in _tensors(found)]

    def _fake(self, each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        with no_dispatch():
            shape = torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")
        return FakeTensor(self._fakes, shape, each.device)


def _common_device(operation: Any, arguments: Any, keywords: Any) -> torch.device:
    """Returns the device of an operation's tensors; a scalar may lie on the CPU."""
    tensors = _tensors((arguments, keywords))
    given = {each.device for each in tensors if each.dim()} or {tensors[0].device}
    assert len(given) == 1, f"{operation} has tensors of {given}"
    return given.pop()


def _placed(each: Any, devices: Iterator[torch.device], given: dict[int, torch.Tensor]) -> Any:
    """Returns a result on its device: an argument itself, if the operation changed or returned it."""
    if not isinstance(each, torch.Tensor):
        return each
    device, own = next(devices), given.get(id(each))
    if own is not None and own.device == device:
        return own
    return OnGpu(each) if device == GPU else each


def _named(each: Any) -> Any:
    """Returns an argument of a function, with the GPU for CUDA's device."""
    return GPU if isinstance(each, torch.device) and each.type == "cuda" else each


def _plain(each: Any) -> Any:
    """Returns an argument of an operation as the CPU's."""
    if isinstance(each, tuple | list):
        return type(each)(map(_plain, each))
    if isinstance(each, torch.device):
        return torch.device("cpu")
    return each.held if isinstance(each, OnGpu) else each


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yields arguments of an operation, those of lists too."""
    for each in arguments:
        if isinstance(each, tuple | list):
            yield from _leaves(each)
        else:
            yield each


def _kind(each: Any) -> object:
    """Returns what the devices of an operation's results depend on."""
    if isinstance(each, torch.Tensor):
        return each.device, each.dim() == 0
    return each if isinstance(each, torch.device) else type(each)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


@contextmanager
def pretend_gpu(pageable: Collection[str] | None = None, over_gloo: bool = False) -> Iterator[_Pretending]:
    """A context in which the device GPU computes, on this thread and on those that start in it.

    Args:
        pageable: the functions, "package/file.py function", that may copy between the GPU and memory of the host
            that is not pinned; None = all.
        over_gloo: whether ranks send over gloo; else they do as over NCCL.
    """
    memory, ranks = PretendedMemory(), PretendedRanks(over_gloo)
    pretending = _Pretending(memory, ranks, pageable)
    run, update = threading.Thread.run, NativeAdamW.__call__

    def run_with_gpu(thread: threading.Thread) -> None:
        with pretending, _Making(pretending):
            run(thread)

    def update_on_host(native: NativeAdamW, given: AdamWUpdate, threads: int) -> None:
        addresses = {name: getattr(given, name) or 0 for name in ("master", "exp_avg", "exp_avg_sq", "grad", "bf16")}
        on_gpu = [name for name, address in addresses.items() if address & _NOT_OF_HOST]
        assert not on_gpu, f"native code gets {on_gpu} in memory of the GPU"
        update(native, given, threads)

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "cudart", lambda: memory)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: PretendedStream(memory, pretending.waited))
        patch.setattr(torch.cuda, "Stream", lambda device=None: PretendedStream(memory, pretending.waited))
        patch.setattr(torch.cuda, "stream", lambda stream: stream())
        patch.setattr(threading.Thread, "run", run_with_gpu)
        patch.setattr(NativeAdamW, "__call__", update_on_host)
        patch.setattr(take_over, "TrainedParameter", TrainedOnGpu)
        patch.setattr(take_over, "check_module", lambda model, *arguments: next(model.parameters()).device)
        patch.setattr(saved_activations, "PLAIN", (*saved_activations.PLAIN, OnGpu))
        ranks.install(patch)
        install_attention(patch)
        stack.enter_context(pretending)
        stack.enter_context(_Making(pretending))
        yield pretending
