"""What users do around forward, backward, step, save and load: losses, gradients, graphs, hooks, errors."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tk.core.errors import ShardCorrupt
from tk.tests.train.foreign.between_calls import Loop, Ours, loss_of
from tk.tests.train.foreign.script import Script, parameters, refused, turn

GRADIENTS = r"\.grad was (read|set), but the engine keeps"
SHARE = "as torch, with the gradient of loss / (accumulate x ranks), times fp16's loss scale"
NO_READ = "the engine has the gradients; `grad_clip`, `last_grad_norm`, hooks"


def zero_grad_between(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    loop.zero_grad()
    turn(loop, 2)


def module_zero_grad_first(loop: Loop, folder: Path) -> None:
    for number in (1, 2):
        loop.module.zero_grad()
        turn(loop, number)


def module_zero_grad_between(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    loop.module.zero_grad()


def fail_in_forward(loop: Loop, folder: Path) -> None:
    def fail(module: nn.Module, inputs: Any) -> None:
        raise ArithmeticError

    turn(loop, 1)
    handle = loop.module.blocks[1].register_forward_pre_hook(fail)
    with suppress(ArithmeticError):
        loop.forward(2)
    handle.remove()


def fail_in_backward(loop: Loop, folder: Path) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    def fail_behind(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    turn(loop, 1)
    handle = loop.module.blocks[1].register_forward_hook(fail_behind)
    output = loop.forward(2)
    handle.remove()
    with suppress(ArithmeticError):
        loop.backward(loss_of(output))


def fail_and_discard(loop: Loop, folder: Path) -> None:
    fail_in_backward(loop, folder)
    loop.zero_grad()


def fail_and_step(loop: Loop, folder: Path) -> None:
    fail_in_backward(loop, folder)
    loop.step()


def retain_graph(loop: Loop, folder: Path) -> None:
    loss = loss_of(loop.forward(1))
    loop.backward(loss, retain_graph=True)
    loop.backward(loss)
    loop.step()


def backward_twice(loop: Loop, folder: Path) -> None:
    loss = loss_of(loop.forward(1))
    loop.backward(loss)
    loop.backward(loss)


def one_too_many(loop: Loop, folder: Path) -> None:
    for number in (1, 2):
        loop.backward(loss_of(loop.forward(number)))


def without_module(loop: Loop, folder: Path) -> None:
    loop.backward(torch.ones(3, requires_grad=True).sum())
    loop.step()


def step_alone(loop: Loop, folder: Path) -> None:
    loop.step()
    turn(loop, 1)
    loop.step()


def no_grad_between(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    with torch.no_grad():
        loop.forward(2)
    turn(loop, 3)


def inference_between(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    with torch.inference_mode():
        loop.forward(2)
    turn(loop, 3)


def train_and_eval(loop: Loop, folder: Path) -> None:
    torch.manual_seed(5)
    loop.module.train()
    turn(loop, 1)
    loop.module.eval()


def hook_on_parameter(loop: Loop, folder: Path) -> None:
    loop.module.head.weight.register_hook(lambda grad: grad * 0.5)
    turn(loop, 1)


def hook_on_tensor(loop: Loop, folder: Path) -> None:
    output = loop.forward(1)
    output.register_hook(lambda grad: grad * 0.5)
    loop.backward(loss_of(output))
    loop.step()


def hook_on_module(loop: Loop, folder: Path) -> None:
    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (inputs[0] * 0.5,)

    loop.module.blocks[1].register_full_backward_hook(halve)
    turn(loop, 1)


def hook_that_reads_grad(loop: Loop, folder: Path) -> None:
    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    loop.module.head.weight.register_post_accumulate_grad_hook(double)
    turn(loop, 1)


def read_grad(loop: Loop, folder: Path) -> list[torch.Tensor | None]:
    loop.backward(loss_of(loop.forward(1)))
    return [p.grad for p in parameters(loop)]


def set_grad(loop: Loop, folder: Path) -> None:
    loop.module.head.weight.grad = torch.ones(3, 6, dtype=loop.dtype)


def clip_norm(loop: Loop, folder: Path) -> None:
    loop.backward(loss_of(loop.forward(1)))
    nn.utils.clip_grad_norm_(parameters(loop), 0.1)


def clip_value(loop: Loop, folder: Path) -> None:
    loop.backward(loss_of(loop.forward(1)))
    nn.utils.clip_grad_value_(parameters(loop), 0.1)


def torch_optimizer(loop: Loop, folder: Path) -> None:
    optimizer = torch.optim.SGD(loop.module.parameters(), lr=0.1)
    loop.backward(loss_of(loop.forward(1)))
    optimizer.step()


def uneven(loop: Loop, folder: Path) -> None:
    for number in range(3):
        turn(loop, number)
    loop.zero_grad()
    turn(loop, 3)


def autocast(loop: Loop, folder: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = loop.forward(1)
    loop.backward(loss_of(output))
    loop.step()


def anomaly(loop: Loop, folder: Path) -> None:
    with torch.autograd.set_detect_anomaly(True):
        turn(loop, 1)


def compile_in_place(loop: Loop, folder: Path) -> None:
    loop.module.compile(backend="aot_eager")
    for number in (1, 2):
        turn(loop, number)


def recompute(loop: Loop, folder: Path) -> None:
    loop.module.recompute = True
    turn(loop, 1)


def save_between(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    loop.save(folder)
    turn(loop, 2)


def damaged_load(loop: Loop, folder: Path) -> None:
    turn(loop, 0)
    loop.save(folder)
    for path in folder.glob("step-*/optim-exp_avg_sq-*"):  # read last
        with path.open("r+b") as file:  # on every rank, the same bytes
            file.seek(-8, os.SEEK_END)
            file.write(b"damaged!")
    turn(loop, 1)
    with pytest.raises(ShardCorrupt):
        loop.load(folder)
    turn(loop, 2)


def load_between(loop: Loop, folder: Path) -> None:
    for number in (1, 2):
        turn(loop, number)
    loop.save(folder)
    turn(loop, 3)
    loop.load(folder)
    turn(loop, 4)


def roll_back(loop: Loop, folder: Path) -> None:
    turn(loop, 1)
    loop.save(folder)
    for number in (2, 3):
        turn(loop, number)
    loop.load(folder)


def scale_loss(loop: Loop, folder: Path) -> None:
    loop.backward(loss_of(loop.forward(1)) * 0.25)
    loop.step()


def no_loss(loop: Loop, folder: Path) -> None:
    loop.backward(None)  # type: ignore[arg-type]


def nan_loss(loop: Loop, folder: Path) -> None:
    for _ in range(40):  # fp16 lowers its loss scale first
        loop.backward(loss_of(loop.forward(1)) * torch.nan)
        loop.step()


def loss_of_no_graph(loop: Loop, folder: Path) -> None:
    with torch.no_grad():
        output = loop.forward(1)
    loop.backward(loss_of(output))


def vector_loss(loop: Loop, folder: Path) -> None:
    loop.backward(loop.forward(1))


def data_parallel(loop: Loop, folder: Path) -> None:
    wrapped = nn.DataParallel(loop.module)
    loop.backward(loss_of(wrapped(torch.ones(4, 6, dtype=loop.dtype))))
    loop.step()


def call_module(loop: Loop, folder: Path) -> None:
    loop.backward(loss_of(loop.module(torch.ones(4, 6, dtype=loop.dtype))))
    loop.step()


def old_graph(loop: Loop, folder: Path) -> None:
    output = loop.forward(1)
    turn(loop, 2)
    loop.backward(loss_of(output))


def plain_backward(loop: Loop, folder: Path) -> None:
    loss_of(loop.forward(1)).backward()


def wide_inputs(loop: Loop, folder: Path) -> None:
    if isinstance(loop, Ours):
        loop.engine(torch.ones(4, 6, dtype=torch.float64))


OF_PASSES = {
    "`zero_grad()` between micro-batches": Script(zero_grad_between, "as torch, by `engine.zero_grad()`", accumulate=2),
    "`module.zero_grad()` before each step": Script(module_zero_grad_first),
    "`module.zero_grad()` between micro-batches": refused(
        module_zero_grad_between, GRADIENTS, "`engine.zero_grad()`", 2
    ),
    "an error in forward, then the next batch": Script(fail_in_forward, accumulate=2),
    "an error in backward, then `zero_grad()`": Script(fail_and_discard, "as torch, by `engine.zero_grad()`"),
    "an error in backward, then `step()`": refused(fail_and_step, "last engine.backward failed", "`zero_grad()` first"),
    "`retain_graph=True` and two backwards": Script(retain_graph, accumulate=2),
    "two backwards of one loss": refused(backward_twice, "a second time|older|graph", "by torch, too", 2),
    "more backwards than `accumulate`": refused(one_too_many, "once more than accumulate = 1", "raise `accumulate`"),
    "backward of a loss without the module": Script(without_module, "a gradient of zero: weight decay and momentum"),
    "`step()` without backward": Script(step_alone),
    "evaluation under `no_grad` between micro-batches": Script(no_grad_between, accumulate=2),
    "evaluation under `inference_mode` between micro-batches": Script(inference_between, accumulate=2),
    "`module.train()`, `module.eval()`": Script(train_and_eval),
    "a hook on a parameter": Script(hook_on_parameter, SHARE),
    "a hook on a tensor": Script(hook_on_tensor, SHARE),
    "a full backward hook on a module": Script(hook_on_module, SHARE),
    "a post-accumulate hook that reads `p.grad`": refused(hook_that_reads_grad, GRADIENTS, NO_READ),
    "reading `p.grad` before the step": refused(read_grad, GRADIENTS, NO_READ),
    "`p.grad = tensor`": refused(set_grad, GRADIENTS, NO_READ),
    "`clip_grad_norm_`": refused(clip_norm, GRADIENTS, NO_READ),
    "`clip_grad_value_`": refused(clip_value, GRADIENTS, NO_READ),
    "an optimizer of torch on the parameters": refused(torch_optimizer, GRADIENTS, "the engine has an AdamW"),
    "fewer micro-batches than `accumulate` at the end": Script(
        uneven, "`step()` is False until there are enough; `zero_grad()` discards the rest", accumulate=2
    ),
    "`torch.autocast` around forward": Script(autocast),
    "`set_detect_anomaly`": Script(anomaly),
    "`module.compile()`": Script(compile_in_place, "as torch; at stage 3 what is between the gathers is compiled"),
    "`torch.utils.checkpoint`": Script(recompute),
    "a save between micro-batches": Script(
        save_between, "as torch: the gradients stay, and are not saved", accumulate=2
    ),
    "a load between micro-batches": Script(load_between, "discards their gradients", accumulate=2),
    "a load of an older step": Script(roll_back),
    "a load that finds damage, then the next batch": refused(
        damaged_load, r"holds values of two states.*engine\.load", "until a load succeeds"
    ),
    "a loss times a factor": Script(scale_loss),
    "`backward(None)`": refused(no_loss, "takes the scalar loss", "by name"),
    "a loss of NaN": refused(nan_loss, "loss nan", "nothing is updated"),
    "a loss from under `no_grad`": refused(loss_of_no_graph, "without a graph", "by name"),
    "a loss of several values": refused(vector_loss, r"a tensor of shape \[4, 3\]", "by name"),
    "`DataParallel(engine.module)` on a CPU": Script(data_parallel),
    "`engine.module(batch)` called by itself": Script(call_module),
    "backward through a graph older than a step": refused(
        old_graph, "modified by an inplace operation|from before the parameters", "by torch, too"
    ),
    "`loss.backward()`": refused(plain_backward, r"call engine\.backward", "`engine.backward(loss)`"),
    "a batch of another dtype": refused(wide_inputs, r"x\.to\(torch\.", "torch's error, and what to cast"),
}
