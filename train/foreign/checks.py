"""The checks of a module that `initialize` gets: of every parameter and buffer, before anything is changed.

A module is refused if training, casts, saves or loads would not do the same as in plain PyTorch.
"""

import hashlib
from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from ...core.dtypes import COMPUTE_DTYPES
from ...core.errors import ConfigError
from ...parallel.collectives import gather_bytes
from ...parallel.mesh import Group
from ...parallel.torch_dtypes import has_format, torch_dtype
from ..zero.outputs import tensors_in
from ..zero.trained_parameter import TrainedParameter
from .construction_log import ConstructionLog
from .on_meta import builds_on_meta
from .peft_adapter import frozen_keys

FLOATS = tuple(torch_dtype(dtype) for dtype in COMPUTE_DTYPES)
_OF_ONE_DTYPE = (_NormBase, _SpectralNorm)
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel, FSDPModule)


def check_module(model: object, dtype: torch.dtype, loads: bool = False) -> torch.device:
    """Checks a module; changes nothing.

    Args:
        model: the module.
        dtype: the dtype that its floating-point parameters will get.
        loads: whether the values of its parameters come from a checkpoint.

    Returns:
        The device of all its tensors; of parameters without memory (`on_meta`) the one that they will be on.

    Raises:
        ConfigError: the module cannot be trained; the message names the cause and a remedy.
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}: make one of it" if isinstance(model, type) else f"of type {type(model)}"
        raise ConfigError(f"initialize's model is {kind}; it takes a torch.nn.Module.")
    if builds_on_meta():
        raise ConfigError("initialize was called inside of `with tk.train.on_meta():`. Leave that block first.")
    problem = next(_problems(model, dtype, loads), None)
    if problem:
        raise ConfigError(f"initialize cannot take this {type(model).__name__}: {problem}")
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    if any(parameter.is_meta for parameter in model.parameters()) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return devices[0] if devices else torch.device("cpu")


def describe(model: nn.Module) -> Iterator[str]:
    """Yields the properties of the module that must be the same on all ranks, a line per tensor."""
    yield f"a {type(model).__name__}"
    learning = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    first: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        shared = first.setdefault(id(tensor), name)
        same = f", the same as {shared}" if shared != name else ""
        kind = f"{', trained' if name in learning else ''}{', without memory' if tensor.is_meta else ''}"
        yield f"{name}: {tensor.dtype} {list(tensor.shape)}{kind}{same}"


def check_alike(lines: list[str], world: Group) -> None:
    """Compares the arguments of all ranks; every rank calls it.

    Raises:
        ConfigError: they differ; raised on every rank, with the first line that differs.
    """
    mine = "\n".join(lines).encode()
    digests = gather_bytes(hashlib.sha256(mine).digest(), world)
    if len(set(digests)) == 1:
        return
    all_lines = [data.decode().split("\n") for data in gather_bytes(mine, world)]
    other = next(rank for rank, theirs in enumerate(all_lines) if theirs != all_lines[0])
    pairs = zip_longest(all_lines[0], all_lines[other], fillvalue="nothing more")
    here, there = next((left, right) for left, right in pairs if left != right)
    raise ConfigError(
        f"initialize needs the same model and arguments on all ranks: rank {other} has {there!r}, rank 0 {here!r}."
    )


def note_dtypes(error: RuntimeError, batch: object, dtype: torch.dtype) -> None:
    """Adds a note to an error of forward if the batch has floating-point tensors of another dtype than parameters."""
    found = {tensor.dtype for tensor in tensors_in(batch) if tensor.is_floating_point()} - {dtype}
    if found:
        names = ", ".join(sorted(map(str, found)))
        error.add_note(
            f"The batch has tensors in {names}, and the module's parameters are {dtype}, which torch rarely mixes. "
            f"Cast the batch's floating-point tensors, x.to({dtype}), or run forward under torch.autocast."
        )


def _problems(model: nn.Module, dtype: torch.dtype, loads: bool) -> Iterator[str]:
    """Yields every problem; later checks rely on earlier ones."""
    for name, module in model.named_modules():
        yield from _of_module(name or "the module itself", module, dtype)
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    for name, tensor in (parameters | buffers).items():
        yield from _of_memory(name, tensor, loads)
    for name, parameter in parameters.items():
        yield from _of_parameter(name, parameter, dtype)
    yield from frozen_keys(model)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        yield "no parameter has requires_grad=True, so there is nothing to train."
    yield from _of_devices(parameters | buffers)
    yield from _of_names(model)
    yield from _of_overlaps(parameters, buffers)


def _of_module(name: str, module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    if isinstance(module, _WRAPPERS):
        yield f"{name} is wrapped in {type(module).__name__}, which exchanges gradients, too. Give the module inside."
    if hasattr(module, "_orig_mod"):
        yield (
            f"{name} is a result of torch.compile, which calls every tensor _orig_mod.*. Give the module that was "
            "compiled, and call its .compile() in place."
        )
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield (
            f"{name} ({type(module).__name__}) has get_extra_state, and a checkpoint stores tensors only. Keep that "
            "state in buffers (register_buffer)."
        )
    yield from _of_attributes(name, module)
    for key, buffer in module._buffers.items() if isinstance(module, _OF_ONE_DTYPE) else ():
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
            yield (
                f"{name} ({type(module).__name__}) has {key} in {buffer.dtype}, which torch does not mix with "
                f"parameters in {dtype}. Train in the buffer's precision, or cast the module first, "
                f"model.to({dtype}), if its statistics may be as coarse."
            )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        yield f"{name} gives sparse gradients, which AdamW does not take. Make it with sparse=False."


def _of_attributes(name: str, module: nn.Module) -> Iterator[str]:
    """Yields a problem if a list, tuple or mapping of the module's own holds what was computed under `on_meta`."""
    for key, value in vars(module).items():
        if isinstance(value, list | tuple | dict) and key not in ("_parameters", "_buffers", "_modules"):
            for held in value.values() if isinstance(value, dict) else value:
                if isinstance(held, torch.Tensor) and held.is_meta and not isinstance(held, nn.Parameter):
                    yield (
                        f"{name} ({type(module).__name__}) holds in {key} a tensor that it computed from a parameter "
                        "without memory. Make it a buffer (register_buffer) or an attribute of its own, or build that "
                        "module outside of tk.train.on_meta."
                    )


def _of_memory(name: str, tensor: torch.Tensor, loads: bool) -> Iterator[str]:
    """Yields a problem if a parameter or buffer is not an ordinary tensor that has values, or gets some."""
    if isinstance(tensor, TrainedParameter):
        yield f"{name} is trained by an engine. A module that was given to initialize before is built anew, or copied."
    elif nn.parameter.is_lazy(tensor):
        yield f"{name} has no shape yet. Run one batch through the module first."
    elif tensor.is_meta and not (isinstance(tensor, nn.Parameter) and (loads or ConstructionLog.of(tensor))):
        yield (
            f"{name} is on the meta device and has no values. Build the module inside of tk.train.on_meta(), where "
            "initialize can make them, and cast it there; or use to_empty(device=...) and fill it first."
        )
    elif type(tensor.data) is not torch.Tensor or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        yield (
            f"{name} is a {type(tensor).__name__}, not a plain tensor: sharded, quantized and other special tensors "
            "are not taken apart. Give the module with plain parameters."
        )
    elif tensor.layout != torch.strided or tensor.is_quantized:
        yield f"{name} is {tensor.dtype} in layout {tensor.layout}; only dense tensors are taken."


def _of_parameter(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Iterator[str]:
    kept = not parameter.requires_grad and not parameter.is_floating_point() and not parameter.is_complex()
    if parameter.dtype not in FLOATS and not kept:
        instead = "keep real and imaginary part as one fp32 parameter (torch.view_as_real)"
        if parameter.dtype == torch.float64:
            instead = "model.float() makes it fp32, if that is meant"
        elif not parameter.is_complex():
            instead = "dequantize it first"
        yield f"the parameter {name} is {parameter.dtype}; parameters are fp32, bf16 or fp16: {instead}."
    if not parameter.is_leaf:
        yield f"the parameter {name} is computed from others (it has a grad_fn); parameters are leaves."
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    if any(hooks):
        yield f"the parameter {name} has hooks for its gradient. Register hooks after initialize."
    narrows = dtype == torch.float16 and parameter.dtype in (torch.float32, torch.bfloat16)
    if (
        narrows
        and not parameter.is_meta
        and parameter.numel()
        and parameter.detach().abs().max() > torch.finfo(dtype).max
    ):
        yield f"the parameter {name} has values beyond fp16's largest, {torch.finfo(dtype).max:g}; take bf16."


def _of_devices(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    there = {name: tensor.device for name, tensor in tensors.items() if not tensor.is_meta}
    if not there:
        return
    first, device = next(iter(there.items()))
    for name, other in there.items():
        if other != device:
            yield f"{first} is on {device} and {name} on {other}; a rank's module is on one device."
    if device.type == "cpu" and torch.cuda.is_available() and len(there) == len(tensors):
        yield (
            "it is on the CPU, and this machine has CUDA. model.cuda() first; to train on the CPU, start with "
            "CUDA_VISIBLE_DEVICES= (empty)."
        )
    if device.type not in ("cpu", "cuda"):
        yield f"it is on {device}; training runs on cpu and cuda."


def _of_names(model: nn.Module) -> Iterator[str]:
    """Yields a problem unless `state_dict` has exactly the parameters and buffers, in dtypes that files can hold."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, torch.Tensor] = parameters | dict(model.named_buffers(remove_duplicate=False))
    stored: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in stored.items():
        if own.get(name) is not tensor:
            yield f"its state_dict has {name}, which is no parameter or buffer of that name: hooks change it."
        elif not (name in parameters and tensor.is_floating_point()) and not has_format(tensor.dtype):
            yield (
                f"the buffer {name} is {tensor.dtype}, which a checkpoint does not store. Make it real "
                "(torch.view_as_real), or register it with persistent=False where it can be computed again."
            )
    for name in parameters:
        if name not in stored:
            yield f"its state_dict lacks the parameter {name}: hooks change it, and a save would lose it."


def _of_overlaps(parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yields a problem if a trained parameter shares memory with another tensor: only the parameter would be moved."""
    spans = sorted((*_span(tensor), name) for name, tensor in (parameters | buffers).items() if tensor.numel())
    memory, end, before = 0, 0, ""
    for where, low, high, name in spans:
        trains = [other for other in (before, name) if other in parameters and parameters[other].requires_grad]
        end, memory = end if where == memory else 0, where
        if low < end and trains:
            yield (
                f"{before} and {name} share memory without being one Parameter: training would part them. Tie them as "
                "one (b.weight = a.weight), or clone one of them."
            )
        if high > end:
            end, before = high, name


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns where a tensor lies: a memory (0: the process's), the address of its first element and its end.

    Each storage on the meta device is a memory of its own.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    if tensor.is_meta:
        low = int(tensor.storage_offset()) * tensor.element_size()
        return tensor.untyped_storage()._cdata, low, low + size
    return 0, tensor.data_ptr(), tensor.data_ptr() + size
