"""Two loops with the same calls, `initialize` and plain PyTorch, in which scripts do what users do between them.

The plain loop is AdamW on fp32 masters: a value that a script writes into a low-precision parameter becomes the
master's; gradients are summed in fp32; a parameter without a gradient counts as one with a gradient of zero.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tk.train import initialize

OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "grad_clip": 0.5}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 65536.0


class Net(nn.Module):
    """Two blocks, which ZeRO stage 3 gathers one by one, parameters outside of them, and a buffer."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("running", torch.zeros(6))
        self.recompute = False

    def linear(self, number: int) -> nn.Linear:
        layer = self.blocks[number].get_submodule("0")
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        if self.training:
            self.running.lerp_(x.detach().float().mean(0), 0.1)
        out: torch.Tensor = self.head(self.dropout(x) * self.scale)
        return out


def batch(number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(dtype)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    wave = torch.arange(output.numel()).cos().view_as(output)
    return functional.mse_loss(output.float(), wave)


class Ours:
    """The loop of `initialize`."""

    def __init__(self, precision: Any, zero: Any, accumulate: int) -> None:
        self.dtype = DTYPES[precision]
        self.module = Net().eval()
        self.engine = initialize(self.module, OPTIMIZER, zero=zero, precision=precision, accumulate=accumulate)

    def forward(self, number: int = 0) -> torch.Tensor:
        output: torch.Tensor = self.engine(batch(number, self.dtype))
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.engine.backward(loss, retain_graph=retain_graph)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def save(self, folder: Path) -> None:
        self.engine.save(folder, wait=True)

    def load(self, folder: Path) -> None:
        self.engine.load(folder)

    def whole(self) -> AbstractContextManager[None]:
        return self.engine.full_parameters()

    def state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.engine.state_dict()
        return state


class Plain:
    """The loop of plain PyTorch."""

    def __init__(self, precision: Any, zero: Any, accumulate: int) -> None:
        self.dtype, self.accumulate = DTYPES[precision], accumulate
        self.module = Net().eval()
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.loss_scale = LOSS_SCALE if precision == "fp16" else 1.0
        self.masters = {name: p.detach().float().clone() for name, p in self.module.named_parameters()}
        decays = {True: [v for v in self.masters.values() if v.dim() >= 2]}
        decays[False] = [v for v in self.masters.values() if v.dim() < 2]
        groups = [{"params": values, "weight_decay": 0.1 * decay} for decay, values in decays.items()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
        self.grads = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.passes = 0
        self.saved: Any = None

    def forward(self, number: int = 0) -> torch.Tensor:
        output: torch.Tensor = self.module(batch(number, self.dtype))
        return output

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss / self.accumulate * self.loss_scale).backward(retain_graph=retain_graph)
        self.passes += 1
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                self.grads[name] += parameter.grad.float() / self.loss_scale
                parameter.grad = None

    def step(self) -> None:
        if self.passes < self.accumulate:
            return
        self._take_written()
        for name, master in self.masters.items():
            master.grad = self.grads[name]
        if not nn.utils.clip_grad_norm_(self.masters.values(), 0.5).isfinite():
            assert self.loss_scale > 1, "only fp16 leaves steps out"
            self.loss_scale /= 2
            self.zero_grad()
            return
        self.optimizer.step()
        self.zero_grad()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.masters[name])

    def _take_written(self) -> None:
        for name, parameter in self.module.named_parameters():
            written = parameter.detach() != self.masters[name].to(self.dtype)
            self.masters[name][written] = parameter.detach()[written].float()

    def zero_grad(self) -> None:
        self.grads = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.passes = 0
        self.module.zero_grad()

    def save(self, folder: Path) -> None:
        self._take_written()
        masters = {name: master.clone() for name, master in self.masters.items()}
        buffers = {name: value.clone() for name, value in self.module.named_buffers()}
        states = {name: dict(self.optimizer.state[master]) for name, master in self.masters.items()}
        self.saved = masters, buffers, {n: {k: v.clone() for k, v in state.items()} for n, state in states.items()}

    def load(self, folder: Path) -> None:
        masters, buffers, states = self.saved
        self.zero_grad()
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                self.masters[name].copy_(masters[name])
                parameter.copy_(masters[name])
                self.optimizer.state[self.masters[name]] = {k: v.clone() for k, v in states[name].items()}

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.module.state_dict().items()}


Loop = Ours | Plain
