"""Runs one rank's part of a schedule over its stages: computes, and exchanges activations and gradients meanwhile.

It knows no model: a stage is a function from (micro-batch, activation) to an activation, or to the loss on the last.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...core.errors import WorkerDied
from ...parallel.mesh import Group
from ...parallel.point_to_point import PendingMessage, Receive, Send, connect, exchange
from ...parallel.weight_grads import DeferredGrad, WeightGradQueue, run_deferred
from .actions import Action, Kind, Schedule, Transfer
from .communication import Batch, plan_communication

MAX_SENDING = 2  # tensors that are kept for sends under way; before more, the oldest is waited for


class PipelineStage(Protocol):
    """A stage of the model with its share of the step's micro-batches."""

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        """The activation for the next stage from `x`, the previous stage's (None on the first, which has its own
        input); on the last stage the micro-batch's loss, a scalar scaled as it is to be summed."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses every cut between two stages, in both directions."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


Key = tuple[int, int]  # (stage, micro-batch)


@dataclass(slots=True)
class _Step:
    """What lives from one action to another.

    Attributes:
        arrivals: receives posted, by the action that needs them.
        results: computed and not yet sent, by the action that did.
        sending: sends under way, oldest first.
        inputs: received activations whose gradients will be sent back.
        roots: where a backward begins: the graph behind an activation, whose own memory is free once it is sent, or
            the loss. None where nothing in the stage learns.
        weight_grads: put off by the backward of a stage's input.
    """

    losses: torch.Tensor
    arrivals: dict[Action, tuple[Transfer, PendingMessage]] = field(default_factory=dict)
    results: dict[Action, torch.Tensor] = field(default_factory=dict)
    sending: deque[PendingMessage] = field(default_factory=deque)
    inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    roots: dict[Key, torch.Tensor | GradientEdge | None] = field(default_factory=dict)
    weight_grads: dict[Key, list[DeferredGrad]] = field(default_factory=dict)


Around = Callable[[Action, bool], AbstractContextManager[None]]


def _nothing_around(action: Action, last: bool) -> AbstractContextManager[None]:
    return nullcontext()


class PipelineExecutor:
    """One pipeline rank. Made by all ranks of `pp` together; `run` is called by all of them for every step.

    Args:
        stages: this rank's, by global index.
        weight_grads: needed by schedules that split the backward.
        around: the context that an action is computed in; told whether it is the last one that adds to its stage's
            weight gradients, so that they are complete after it.
        tell: told each `phase`.

    Attributes:
        phase: what this rank does now, for reports: "forward stage 1 micro-batch 3", or for whom it waits.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        pp: Group,
        boundary: Boundary,
        *,
        weight_grads: WeightGradQueue | None = None,
        around: Around = _nothing_around,
        tell: Callable[[str], None] = lambda phase: None,
    ) -> None:
        assert schedule.pp == pp.size
        assert weight_grads is not None or not schedule.splits_backward
        self.schedule = schedule
        self.stages = stages
        self.pp = pp
        self.boundary = boundary
        self.phase = "idle"
        self._actions = schedule.ranks[pp.rank]
        self._posts = plan_communication(schedule)[pp.rank]
        self._trains = not schedule.forward_only
        self._weight_grads = weight_grads if schedule.splits_backward else None
        self._around = around
        self._tell = tell
        # By stage, so that a later action replaces an earlier one.
        completes = {a.stage: a for a in self._actions if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        self._last_backwards = frozenset(completes.values())
        connect(pp, boundary.device)

    def run(self) -> torch.Tensor:
        """One step, or one evaluation if the schedule is forward-only. Gradients are added to the parameters' `grad`.

        Returns:
            The sum of the micro-batches' losses, fp64, on the rank of the last stage; 0 elsewhere.

        Raises:
            WorkerDied: a neighbour is gone, or did not answer within the process group's timeout.
        """
        step = _Step(torch.zeros((), dtype=torch.float64, device=self.boundary.device))
        with torch.set_grad_enabled(self._trains), self._putting_off_weight_grads():
            for action, batches in zip(self._actions, self._posts, strict=False):
                self._post(step, batches)
                self._begin(str(action))
                self._compute(step, action)
            self._post(step, self._posts[-1])
            self._finish_sends(step, 0)
        self.phase = "idle"
        return step.losses

    @contextmanager
    def _putting_off_weight_grads(self) -> Iterator[None]:
        queue = self._weight_grads
        if queue is None:
            yield
            return
        queue.enabled = True
        try:
            yield
        finally:
            queue.enabled = False

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self._tell(phase)

    def _compute(self, step: _Step, action: Action) -> None:
        compute = {Kind.FORWARD: self._forward, Kind.BACKWARD_WEIGHT: self._backward_weight}
        with self._around(action, action in self._last_backwards):
            compute.get(action.kind, self._backward)(step, action)

    def _forward(self, step: _Step, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        x = None if action.stage == 0 else self._arrived(step, action)
        if x is not None and self._trains:
            x.requires_grad_()
        y = self.stages[action.stage].forward(action.micro_batch, x)
        is_loss = action.stage == self.schedule.num_stages - 1
        if is_loss:
            step.losses += y.detach()
        else:
            step.results[action] = y.detach()
        if self._trains:
            step.inputs[key] = x
            step.roots[key] = y if is_loss else get_gradient_edge(y) if y.requires_grad else None

    def _backward(self, step: _Step, action: Action) -> None:
        """The gradient of the input, and of the weights unless they are put off."""
        key = (action.stage, action.micro_batch)
        is_loss = action.stage == self.schedule.num_stages - 1
        grad = None if is_loss else self._arrived(step, action)
        root, x = step.roots.pop(key), step.inputs.pop(key)
        if root is not None:
            torch.autograd.backward(root, grad)
        if self._weight_grads is not None:
            step.weight_grads[key] = self._weight_grads.take()
        if x is not None:
            step.results[action] = torch.zeros_like(x) if x.grad is None else x.grad

    def _backward_weight(self, step: _Step, action: Action) -> None:
        with torch.no_grad():
            run_deferred(step.weight_grads.pop((action.stage, action.micro_batch)))

    def _arrived(self, step: _Step, action: Action) -> torch.Tensor:
        """What the action needs from another rank."""
        transfer, pending = step.arrivals.pop(action)
        self._begin(f"{action}, waiting for rank {transfer.source} of the pipeline")
        with self._naming(f"{transfer} did not come from rank {transfer.source}"):
            tensor = pending.wait()
        self._begin(str(action))
        return tensor

    def _post(self, step: _Step, batches: tuple[Batch, ...]) -> None:
        for batch in batches:
            messages = [self._message(step, transfer) for transfer in batch]
            with self._naming(" and ".join(map(str, batch)) + " cannot be exchanged"):
                pendings = exchange(messages, self.pp)
            for transfer, pending in zip(batch, pendings, strict=True):
                if transfer.source == self.pp.rank:
                    step.sending.append(pending)
                else:
                    step.arrivals[transfer.consumer] = (transfer, pending)
        self._finish_sends(step, MAX_SENDING)

    def _message(self, step: _Step, transfer: Transfer) -> Send | Receive:
        if transfer.source == self.pp.rank:
            return Send(step.results.pop(transfer.producer), transfer.destination)
        like = self.boundary
        return Receive(torch.empty(like.shape, dtype=like.dtype, device=like.device), transfer.source)

    def _finish_sends(self, step: _Step, keep: int) -> None:
        with self._naming("a neighbour did not take what was sent"):
            while len(step.sending) > keep:
                step.sending.popleft().wait()

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WorkerDied(
                f"Rank {self.pp.rank} of the pipeline, at {self.phase}: {what}. That rank is gone, or did not answer "
                f"within parallel.timeout_seconds ({error})."
            ) from error
