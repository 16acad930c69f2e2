"""A module that `initialize` cannot train as plain PyTorch does is refused by name, and is not changed."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tk.core.errors import ConfigError
from tk.tests.rank_pool import RankPool
from tk.train import initialize


class Tensors(nn.Module):
    """A linear layer with further parameters and buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 2}


class Special(nn.Parameter):
    """Stands for quantized and sharded parameters."""


def _two_of_one_memory() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = nn.Parameter(first.weight.data)
    return nn.Sequential(first, second)


def _renamed_in_state_dict() -> nn.Module:
    module = nn.Linear(2, 2)

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state["kernel"] = state.pop("weight")

    module.register_state_dict_post_hook(rename)
    return module


def _hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda gradient: gradient * 2)
    return module


def _computed() -> nn.Module:
    module = nn.Linear(2, 2)
    module._buffers["scale"] = None
    module.register_buffer("odd", torch.ones(2, dtype=torch.complex64))
    return module


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: nn.Linear, "the class Linear: make one"),
    "nothing learns": (lambda: nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
    "no parameters": (nn.ReLU, "nothing to train"),
    "fp64": (lambda: nn.Linear(2, 2).double(), r"weight is torch.float64.*model.float\(\)"),
    "frozen fp64": (lambda: Tensors(a=nn.Parameter(torch.ones(2).double(), requires_grad=False)), "a is torch.float64"),
    "complex": (lambda: Tensors(a=nn.Parameter(torch.ones(2, dtype=torch.complex64))), "a is torch.complex64.*view_as"),
    "fp8": (lambda: Tensors(a=nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))), "a is torch.float8.*dequantize"),
    "complex buffer": (_computed, "buffer odd is torch.complex64.*persistent=False"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet. Run one batch"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device.*to_empty"),
    "special tensors": (lambda: Tensors(a=Special(torch.ones(2))), "a is a Special, not a plain tensor"),
    "sparse gradients": (lambda: nn.Embedding(3, 2, sparse=True), "sparse=False"),
    "sparse bag": (lambda: nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True)), "0 gives sparse gradients"),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(2, 2)), "wrapped in DataParallel"),
    "compiled": (
        lambda: nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)}),
        "the module itself is a result of torch.compile",
    ),
    "extra state": (lambda: nn.Sequential(Extra(2, 2)), r"0 \(Extra\) has get_extra_state.*register_buffer"),
    "state_dict hooks": (_renamed_in_state_dict, "state_dict has kernel"),
    "statistics in fp32": (
        lambda: nn.Sequential(nn.BatchNorm1d(2)),
        "0 .BatchNorm1d. has running_mean in torch.float32",
    ),
    "gradient hooks": (_hooked, "weight has hooks"),
    "memory shared": (_two_of_one_memory, "0.weight and 1.weight share memory.*one Parameter"),
    "a view as buffer": (
        lambda: (lambda weight: Tensors(a=weight, b=weight.data[1:]))(nn.Parameter(torch.ones(4))),
        "a and b share memory",
    ),
    "another device": (lambda: Tensors(a=torch.ones(2, device="meta")), "a is on the meta device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_left_as_it_was(case: str) -> None:
    make, message = REFUSED[case]
    module = make()
    if not isinstance(module, nn.Module):
        with pytest.raises(ConfigError, match=message):
            initialize(module)
        return
    objects = {name: (tensor, tensor.dtype) for name, tensor in module.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        initialize(module, precision="bf16", zero=3)
    for name, tensor in module.named_parameters():
        assert objects[name][0] is tensor
        assert objects[name][1] == tensor.dtype


def test_on_the_cpu_of_a_machine_with_cuda_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"on the CPU, and this machine has CUDA.*CUDA_VISIBLE_DEVICES"):
        initialize(nn.Linear(2, 2))


def test_values_that_fp16_cannot_hold_are_refused() -> None:
    module = Tensors(a=nn.Parameter(torch.tensor([1.0, 7e4])))
    with pytest.raises(ConfigError, match="a has values beyond fp16's largest, 65504"):
        initialize(module, precision="fp16")
    assert module.get_parameter("a").dtype == torch.float32
    initialize(module, precision="bf16")


def test_a_module_is_taken_over_once() -> None:
    module = nn.Linear(2, 2)
    initialize(module)
    with pytest.raises(ConfigError, match="given to initialize before"):
        initialize(module)


def _same(module: nn.Module) -> bool:
    """Whether three steps move `module` as torch's AdamW moves a copy of it."""
    twin = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    engine = initialize(module, {"lr": 1e-2, "weight_decay": 0.0, "betas": [0.9, 0.999], "grad_clip": 0.0}, zero=1)
    for step in range(3):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()
        twin(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = twin.state_dict()
    return all(torch.allclose(value, expected[name], atol=1e-6) for name, value in module.state_dict().items())


class Listed(nn.Linear):
    """It computes with the parameters in a list of its own."""

    def __init__(self) -> None:
        super().__init__(108, 4)
        self.pair = [self.weight, self.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.flatten(1), *self.pair)


class Recurrent(nn.Module):
    """An LSTM keeps its parameters in a list beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lstm(x.flatten(1, 2))[0]
        return output


def _channels_last(frozen: bool) -> nn.Module:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3).requires_grad_(not frozen))
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


def _parametrized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(108, 4)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: _channels_last(frozen=False),
        Listed,
        Recurrent,
        _parametrized,
        lambda: _channels_last(frozen=True),
    ],
    ids=["channels_last", "parameters in a list", "LSTM", "weight_norm", "frozen channels_last"],
)
def test_a_module_that_is_taken_is_trained_as_torch_does(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    assert _same(module)
    assert parametrize.is_parametrized(module) == parametrize.is_parametrized(make())


def differing(case: str) -> str:
    """Returns the error of `initialize` with other arguments on rank 1 than on rank 0; "taken" without one."""
    second = torch.distributed.get_rank() == 1
    module = nn.Linear(2, 3 if second and case == "shape" else 2)
    if second and case == "frozen":
        module.bias.requires_grad_(False)
    try:
        initialize(module, {"lr": 2e-3 if second and case == "lr" else 1e-3})
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "shape",
            r"rank 1 has 'weight: torch.float32 \[3, 2\], trained', rank 0 'weight: torch.float32 \[2, 2\]",
        ),
        ("frozen", r"has 'bias: torch.float32 \[2\]', rank 0 'bias: torch.float32 \[2\], trained'"),
        ("lr", "lr=0.002"),
    ],
)
def test_arguments_that_differ_between_ranks_are_refused(rank_pool: RankPool, case: str, message: str) -> None:
    for answer in rank_pool.run(differing, 2, case=case):
        assert re.search(message, answer), answer
