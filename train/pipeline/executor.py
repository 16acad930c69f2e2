"""Runs one rank's part of a schedule: it computes the actions, and exchanges activations and gradients between them.

It works with any model: a stage is a function from (micro-batch, activation) to an activation, or to the loss if it is
the last one.
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

MAX_SENDING = 2  # sends under way at once on a CPU; each keeps its tensor alive


class PipelineStage(Protocol):
    """A stage of the model."""

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        """Computes the stage for one micro-batch.

        Args:
            micro_batch: the index of the micro-batch in this step.
            x: the activation from the stage before; None on the first stage, which has its own input.

        Returns:
            The activation for the next stage; on the last stage the micro-batch's loss, a scalar. The losses of a step
            are summed, so it must be scaled for that.
        """


@dataclass(frozen=True, slots=True)
class Boundary:
    """The tensors between two stages: activations in one direction and their gradients in the other."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


Key = tuple[int, int]  # (stage, micro-batch)


@dataclass(slots=True)
class _StepState:
    """The values of one step that live longer than an action.

    Attributes:
        losses: the sum of the losses so far, fp64 scalar.
        arrivals: the posted receives, by the action that needs them.
        results: tensors that are computed and not yet sent, by the action that computed them.
        sending: the sends under way, oldest first.
        inputs: received activations, whose gradients will be sent back.
        roots: where each backward begins: at the loss, or at the graph edge of an activation, so that the activation's
            memory is free once it is sent. None if the stage has nothing to train.
        weight_grads: weight gradients that the backward of a stage's input put off.
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
    """The executor of one pipeline rank. All ranks of `pp` construct it together, and all call `run` for every step.

    Args:
        schedule: the actions of all ranks.
        stages: this rank's stages, by global index.
        pp: the pipeline's ranks.
        boundary: the tensors between stages.
        weight_grads: the queue of weight gradients that are put off; schedules that split the backward need it.
        around: returns the context in which an action is computed. Its second argument is whether the stage's weight
            gradients are complete after the action.
        on_phase: called with each new `phase`.

    Attributes:
        phase: this rank's activity, for reports: "forward stage 1 micro-batch 3", or the rank that it waits for.
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
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        assert schedule.pp == pp.size
        assert weight_grads is not None or not schedule.splits_backward
        self.schedule = schedule
        self.stages = stages
        self.pp = pp
        self.boundary = boundary
        self.phase = "idle"
        # With one for each stage a GPU's stream waits for none: the peer's answer to an older one has arrived.
        self._most_sending = MAX_SENDING if boundary.device.type == "cpu" else max(MAX_SENDING, schedule.num_stages)
        self._actions = schedule.ranks[pp.rank]
        self._posts = plan_communication(schedule)[pp.rank]
        self._trains = not schedule.forward_only
        self._weight_grads = weight_grads if schedule.splits_backward else None
        self._around = around
        self._on_phase = on_phase
        # Keyed by stage: a later action replaces an earlier one, and each stage's last one remains.
        completes = {a.stage: a for a in self._actions if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        self._last_backwards = frozenset(completes.values())
        connect(pp, boundary.device)

    def run(self) -> torch.Tensor:
        """Runs one step, or an evaluation if the schedule is forward-only. Adds gradients to the parameters' `grad`.

        Returns:
            The sum of the micro-batches' losses, fp64, on the rank of the last stage; 0 elsewhere.

        Raises:
            WorkerDied: a neighbour has died, or did not answer within the process group's timeout.
        """
        step = _StepState(torch.zeros((), dtype=torch.float64, device=self.boundary.device))
        with torch.set_grad_enabled(self._trains), self._deferring_weight_grads():
            for action, batches in zip(self._actions, self._posts, strict=False):
                self._post(step, batches)
                self._set_phase(str(action))
                self._compute(step, action)
            self._post(step, self._posts[-1])
            self._finish_sends(step, 0)
        self.phase = "idle"
        return step.losses

    @contextmanager
    def _deferring_weight_grads(self) -> Iterator[None]:
        """Makes backward put weight gradients into the queue, if the schedule splits the backward."""
        queue = self._weight_grads
        if queue is None:
            yield
            return
        queue.enabled = True
        try:
            yield
        finally:
            queue.enabled = False

    def _set_phase(self, phase: str) -> None:
        self.phase = phase
        self._on_phase(phase)

    def _compute(self, step: _StepState, action: Action) -> None:
        compute = {Kind.FORWARD: self._forward, Kind.BACKWARD_WEIGHT: self._backward_weight}
        with self._around(action, action in self._last_backwards):
            compute.get(action.kind, self._backward)(step, action)

    def _forward(self, step: _StepState, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        x = None if action.stage == 0 else self._receive(step, action)
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

    def _backward(self, step: _StepState, action: Action) -> None:
        """Computes the gradient of a stage's input, and those of its weights unless they are put off."""
        key = (action.stage, action.micro_batch)
        is_loss = action.stage == self.schedule.num_stages - 1
        grad = None if is_loss else self._receive(step, action)
        root, x = step.roots.pop(key), step.inputs.pop(key)
        if root is not None:  # None: the stage has nothing to train, and sends a gradient of 0
            torch.autograd.backward(root, grad)
        if self._weight_grads is not None:
            step.weight_grads[key] = self._weight_grads.take()
        if x is not None:
            step.results[action] = torch.zeros_like(x) if x.grad is None else x.grad

    def _backward_weight(self, step: _StepState, action: Action) -> None:
        with torch.no_grad():
            run_deferred(step.weight_grads.pop((action.stage, action.micro_batch)))

    def _receive(self, step: _StepState, action: Action) -> torch.Tensor:
        """Waits for the tensor that another rank computes for the action."""
        transfer, pending = step.arrivals.pop(action)
        self._set_phase(f"{action}, waiting for rank {transfer.source} of the pipeline")
        with self._naming_failures(f"{transfer} did not arrive from rank {transfer.source}"):
            tensor = pending.wait()
        self._set_phase(str(action))
        return tensor

    def _post(self, step: _StepState, batches: tuple[Batch, ...]) -> None:
        """Starts the sends and receives of the plan for this point of the schedule."""
        for batch in batches:
            messages = [self._message(step, transfer) for transfer in batch]
            with self._naming_failures(" and ".join(map(str, batch)) + " could not be exchanged"):
                pendings = exchange(messages, self.pp)
            for transfer, pending in zip(batch, pendings, strict=True):
                if transfer.source == self.pp.rank:
                    step.sending.append(pending)
                else:
                    step.arrivals[transfer.consumer] = (transfer, pending)
        self._finish_sends(step, self._most_sending)

    def _message(self, step: _StepState, transfer: Transfer) -> Send | Receive:
        if transfer.source == self.pp.rank:
            return Send(step.results.pop(transfer.producer), transfer.destination)
        like = self.boundary
        return Receive(torch.empty(like.shape, dtype=like.dtype, device=like.device), transfer.source)

    def _finish_sends(self, step: _StepState, keep: int) -> None:
        with self._naming_failures("a neighbour did not receive a tensor"):
            while len(step.sending) > keep:
                step.sending.popleft().wait()

    @contextmanager
    def _naming_failures(self, failure: str) -> Iterator[None]:
        """Turns an error of the backend into one that names this rank, its phase and the message that failed."""
        try:
            yield
        except RuntimeError as error:
            raise WorkerDied(
                f"Rank {self.pp.rank} of the pipeline, at {self.phase}: {failure}. The other rank has died, or did not "
                f"answer within parallel.timeout_seconds ({error})."
            ) from error
