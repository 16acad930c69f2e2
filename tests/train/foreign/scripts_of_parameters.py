"""What users do to parameters, buffers and the module between the calls of an engine."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tk.tests.train.foreign.between_calls import Loop, Ours, loss_of
from tk.tests.train.foreign.script import SPREAD, Script, parameters, refused, spread, turn


def swap_ema(loop: Loop, folder: Path) -> None:
    ema = [p.detach().clone() for p in parameters(loop)]
    turn(loop, 1)
    for average, p in zip(ema, parameters(loop), strict=True):
        average.lerp_(p.detach(), 0.1)
    for average, p in zip(ema, parameters(loop), strict=True):
        mine = p.data.clone()
        p.data.copy_(average)
        average.copy_(mine)
    loop.forward(2)
    for average, p in zip(ema, parameters(loop), strict=True):
        p.data.copy_(average)


def keep_ema(loop: Loop, folder: Path) -> None:
    with loop.whole():
        for p in parameters(loop):
            p.data.mul_(0.9)


@torch.no_grad()
def clamp(loop: Loop, folder: Path) -> None:
    for p in parameters(loop):
        p.clamp_(-0.1, 0.1)


@torch.no_grad()
def add(loop: Loop, folder: Path) -> None:
    loop.module.head.weight.add_(0.25)


def copy_data(loop: Loop, folder: Path) -> None:
    loop.module.head.weight.data.copy_(torch.full((3, 6), 0.3))


def write_kept_data(loop: Loop, folder: Path) -> None:
    kept = loop.module.head.weight.data
    turn(loop, 1)
    kept[1] = 0.7


def assign_data(loop: Loop, folder: Path) -> None:
    loop.module.head.weight.data = torch.zeros(3, 6, dtype=loop.dtype)
    turn(loop, 1)


def write_in_between(loop: Loop, folder: Path) -> None:
    output = loop.forward(1)
    with torch.no_grad(), loop.whole():
        for p in parameters(loop):
            p.mul_(0.5)
    loop.backward(loss_of(output))


def _clamp_weight(module: Any, inputs: Any) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.2, 0.2)


def _clamp_weight_data(module: Any, inputs: Any) -> None:
    module.weight.data.clamp_(-0.2, 0.2)


def clamp_in_forward(loop: Loop, folder: Path) -> None:
    loop.module.linear(0).register_forward_pre_hook(_clamp_weight)
    loop.module.head.register_forward_pre_hook(_clamp_weight_data)
    turn(loop, 1)


def load_state_dict(loop: Loop, folder: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    values = {
        name: torch.rand(v.shape, generator=generator) for name, v in loop.module.state_dict(keep_vars=True).items()
    }
    loop.module.load_state_dict(values)


def write_save_load(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    with loop.whole():
        loop.module.head.weight.data.mul_(3)
    loop.save(folder)
    with loop.whole():
        loop.module.head.weight.data.zero_()
    loop.load(folder)


def freeze(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    loop.module.head.requires_grad_(False)
    turn(loop, 2)


def freeze_for_a_pass(loop: Loop, folder: Path) -> None:
    loop.module.head.requires_grad_(False)
    output = loop.forward(1)
    loop.module.head.requires_grad_(True)
    loop.backward(loss_of(output))
    loop.step()


def deepcopy(loop: Loop, folder: Path) -> None:
    copied = copy.deepcopy(loop.module)
    turn(loop, 1)
    for p in copied.parameters():
        assert type(p) is nn.Parameter
        p.data.zero_()
    loss_of(copied(torch.ones(4, 6, dtype=loop.dtype))).backward()


def deepcopy_whole(loop: Loop, folder: Path) -> None:
    with loop.whole():
        copied = copy.deepcopy(loop.module)
    turn(loop, 1)
    loss_of(copied(torch.ones(4, 6, dtype=loop.dtype))).backward()


def deepcopy_engine(loop: Loop, folder: Path) -> None:
    if isinstance(loop, Ours):
        copy.deepcopy(loop.engine)


def averaged_model(loop: Loop, folder: Path) -> None:
    averaged = AveragedModel(loop.module)
    turn(loop, 1)
    averaged.update_parameters(loop.module)


def cast(loop: Loop, folder: Path) -> None:
    loop.module.to(torch.float64)
    loop.save(folder)


def move_nowhere(loop: Loop, folder: Path) -> None:
    loop.module.to("cpu")
    turn(loop, 1)


def write_buffer(loop: Loop, folder: Path) -> None:
    loop.module.running.fill_(0.5)
    turn(loop, 1)


def reshape_buffer(loop: Loop, folder: Path) -> None:
    loop.module.running = torch.zeros(7)
    turn(loop, 1)
    loop.save(folder)


def replace(loop: Loop, folder: Path) -> None:
    loop.module.head.weight = nn.Parameter(torch.zeros(3, 6, dtype=loop.dtype))
    turn(loop, 1)


def tie(loop: Loop, folder: Path) -> None:
    loop.module.linear(1).weight = loop.module.linear(0).weight
    turn(loop, 1)


def add_parameter(loop: Loop, folder: Path) -> None:
    loop.module.extra = nn.Parameter(torch.zeros(3))
    turn(loop, 1)


def read_values(loop: Loop, folder: Path) -> None:
    assert all(p.norm() >= 0 for p in parameters(loop))
    loop.module.state_dict()


def set_lr(loop: Loop, folder: Path) -> None:
    if isinstance(loop, Ours):
        loop.engine.lr = 1e-4  # type: ignore[attr-defined]


def param_groups(loop: Loop, folder: Path) -> None:
    if isinstance(loop, Ours):
        loop.engine.optimizer.param_groups[0]["lr"] = 1e-4


OF_PARAMETERS = {
    "an EMA copy swapped in and out through `p.data`": spread(swap_ema),
    "`p.data.mul_()` inside `full_parameters()`": Script(keep_ema),
    "`clamp_` of all parameters under `no_grad`": spread(clamp),
    "`p.add_()` under `no_grad`": spread(add),
    "`p.data.copy_()`": spread(copy_data),
    "a write through a `p.data` kept from before a step": spread(write_kept_data),
    "`p.data = tensor`": refused(assign_data, f"moved or cast|{SPREAD}", "copy into it instead"),
    "a write between forward and backward": refused(
        write_in_between, "modified by an inplace operation|from before the parameters", "by torch, too"
    ),
    "a module that writes into its own weights in forward": Script(clamp_in_forward),
    "`module.load_state_dict()`": spread(load_state_dict),
    "`engine.lr = ...`": refused(set_lr, "no attribute 'lr'", "the schedule sets the rate"),
    "`engine.optimizer.param_groups`": refused(param_groups, "schedule", "the schedule sets the rate"),
    "`requires_grad_(False)` in mid-run": refused(freeze, "was frozen after", "freeze before `initialize`"),
    "`requires_grad_(False)` for one forward pass": Script(freeze_for_a_pass, "as torch, with a gradient of zero"),
    "`copy.deepcopy(engine.module)`": spread(deepcopy),
    "`copy.deepcopy` inside `full_parameters()`": Script(deepcopy_whole),
    "`copy.deepcopy(engine)`": refused(deepcopy_engine, "engine cannot be copied", "copy `engine.module`"),
    "`AveragedModel(engine.module)`": spread(averaged_model),
    "`module.to(dtype)`, `half()`": refused(cast, f"moved or cast|{SPREAD}", "cast before `initialize`"),
    "`module.to(device)` where it is": spread(move_nowhere),
    "a write into a buffer": Script(write_buffer),
    "a buffer of another shape": refused(reshape_buffer, "buffer running|broadcast|size", "before `initialize`"),
    "a parameter replaced": refused(replace, "head.weight was replaced", "before `initialize`"),
    "weights tied": refused(tie, f"weight was replaced|{SPREAD}", "before `initialize`"),
    "a parameter added": refused(add_parameter, "extra was added", "before `initialize`"),
    "a write, a save, a write and a load": Script(write_save_load),
    "reading values, `module.state_dict()`": spread(read_values),
}
