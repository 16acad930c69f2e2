"""A small residual model cut into stages, whose linear layers can put off their weight gradients."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tk.parallel.mesh import Group
from tk.parallel.weight_grads import WeightGradQueue
from tk.train.pipeline.executor import Boundary, PipelineExecutor
from tk.train.pipeline.schedules import make_schedule

WIDTH, ROWS, NUM_LAYERS = 6, 3, 11  # 11 layers: no number of stages divides them


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, queue: WeightGradQueue) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        if not ctx.queue.enabled:
            return grad @ weight, grad.t() @ x, None
        parameter: nn.Parameter = ctx.weight

        def add() -> None:
            weight_grad = grad.t() @ x
            parameter.grad = weight_grad if parameter.grad is None else parameter.grad.add_(weight_grad)

        ctx.queue.put(add)
        return grad @ weight, None, None


class Layer(nn.Module):
    """x + W tanh(norm * x): the gradient of W can be put off, that of norm cannot."""

    def __init__(self, queue: WeightGradQueue, generator: torch.Generator) -> None:
        super().__init__()
        self.queue = queue
        self.norm = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, generator=generator))
        self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Linear.apply(torch.tanh(self.norm * x), self.weight, self.queue)  # type: ignore[no-untyped-call]
        return x + y


class ToyStage(nn.Module):
    """Some of the layers. The first stage reads the inputs, the last one the targets."""

    def __init__(
        self, layers: list[Layer], inputs: torch.Tensor | None, targets: torch.Tensor | None, num_micro_batches: int
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.inputs, self.targets = inputs, targets
        self.num_micro_batches = num_micro_batches

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        if self.inputs is not None:
            assert x is None
            x = self.inputs.chunk(self.num_micro_batches)[micro_batch]
        assert x is not None
        for layer in self.layers:
            x = layer(x)
        if self.targets is None:
            return x
        return loss_sum(x, self.targets.chunk(self.num_micro_batches)[micro_batch]) / len(self.targets)


def loss_sum(prediction: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Squared error, summed over rows."""
    return (prediction - targets).square().sum()


def build(
    num_stages: int, num_micro_batches: int, dtype: torch.dtype = torch.float32
) -> tuple[list[ToyStage], WeightGradQueue]:
    """Builds all stages of the model, the same in every process, with ROWS rows of data per micro-batch."""
    generator = torch.Generator().manual_seed(7)
    queue = WeightGradQueue()
    layers = [Layer(queue, generator) for _ in range(NUM_LAYERS)]
    inputs, targets = torch.randn(2, ROWS * num_micro_batches, WIDTH, generator=generator).to(dtype)
    cuts = [index * NUM_LAYERS // num_stages for index in range(num_stages + 1)]
    stages = [
        ToyStage(
            layers[cuts[index] : cuts[index + 1]],
            inputs if index == 0 else None,
            targets if index == num_stages - 1 else None,
            num_micro_batches,
        ).to(dtype)
        for index in range(num_stages)
    ]
    return stages, queue


def one_process(stages: list[ToyStage], num_micro_batches: int) -> torch.Tensor:
    """Runs all stages in this process, one micro-batch after another; leaves gradients in `grad`, returns the loss."""
    total = torch.zeros((), dtype=torch.float64)
    for index in range(num_micro_batches):
        x: torch.Tensor | None = None
        for stage in stages:
            x = stage(index, x)
        assert x is not None
        x.backward()
        total += x.detach()
    return total


def gradients(stage: ToyStage) -> list[torch.Tensor]:
    """Returns the gradients of every parameter."""
    grads = [parameter.grad for parameter in stage.parameters()]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


def weight_gradients(stage: ToyStage) -> list[torch.Tensor]:
    """Returns copies of the gradients that can be put off."""
    return [p.grad.clone() for name, p in stage.named_parameters() if name.endswith("weight") and p.grad is not None]


def whole_group(process_group: dist.ProcessGroup | None = None) -> Group:
    """Returns all ranks of a process group (None = the default one) as a pipeline."""
    group = process_group or dist.group.WORLD
    return Group(group, dist.get_rank(group), dist.get_world_size(group))


def executor_of(
    name: str, virtual_stages: int, num_micro_batches: int, pp: Group, dtype: torch.dtype = torch.float32, **hooks: Any
) -> tuple[PipelineExecutor, dict[int, ToyStage]]:
    """Returns this rank's executor over the toy model, and this rank's stages."""
    schedule = make_schedule(name, pp.size, virtual_stages, num_micro_batches)
    stages, queue = build(schedule.num_stages, num_micro_batches, dtype)
    mine = {index: stages[index] for index in range(pp.rank, schedule.num_stages, pp.size)}
    boundary = Boundary((ROWS, WIDTH), dtype, torch.device("cpu"))
    return PipelineExecutor(schedule, mine, pp, boundary, weight_grads=queue, **hooks), mine
