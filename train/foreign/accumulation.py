"""The backward passes of one step of `initialize`: their gradients, until a step applies or discards them."""

import weakref
from contextlib import suppress

import torch

from ...core.errors import ConfigError, TkError
from ..engine.training_engine import TrainingEngine
from ..zero.trained_parameter import GradientState, TrainedParameter


class Accumulation:
    """The micro-batches of one step on this rank.

    Args:
        engine: the rank's engine.
        size: the number of backward passes per step.

    Attributes:
        passes: the passes made since the last step, one that failed included.
        loss: this rank's share of the step's loss so far, an fp64 scalar.
    """

    def __init__(self, engine: TrainingEngine, size: int) -> None:
        self._engine = engine
        self._size = size
        self._state = GradientState()
        self._failed = False
        self.passes = 0
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        for bucket in engine.buffers.buckets:
            for parameter in bucket.parameters:
                assert isinstance(parameter, TrainedParameter)
                parameter.gradients = weakref.ref(self._state)
        engine.exchange.close()

    @property
    def complete(self) -> bool:
        """Whether all passes of the step were made."""
        return self.passes == self._size

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """Runs one pass; raises as `ModelEngine.backward`."""
        self._engine.home.require()
        self.check()
        self._check_loss(loss)
        if self.complete:
            raise ConfigError(
                f"backward was called once more than accumulate = {self._size} allows before step(). Each call is one "
                "micro-batch: add up its losses, backward(a + b), or raise accumulate. engine.zero_grad() discards "
                "what is accumulated."
            )
        if self.passes == 0:
            self._engine.begin_step()
        self.passes += 1
        self._state.pending = self._failed = True  # until the pass has ended, however it ends
        share = loss / (self._size * self._engine.mesh.world.size)
        self.loss += share.detach()
        self._run(share * self._engine.loss_scale.value, retain_graph)
        self._engine.gradients_arrived(0, last=self.complete)
        self._failed = False

    def _run(self, loss: torch.Tensor, retain_graph: bool) -> None:
        self._engine.exchange.open()
        try:
            with self._engine.whole_pass():
                self._engine.begin_backward(0, last=self.complete)
                torch.autograd.backward(loss, retain_graph=retain_graph)
        except Exception:
            with suppress(TkError, RuntimeError):  # the other ranks wait for this one's part of the exchanges
                self._engine.gradients_arrived(0, last=self.complete)
            raise
        finally:
            self._engine.exchange.close()

    def _check_loss(self, loss: object) -> None:
        found = f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            if loss.dim() == 0 and loss.requires_grad:
                return
            found = f"a tensor of shape {list(loss.shape)}"
            if loss.dim() == 0:
                found = "a loss without a graph (computed under no_grad, or detached)"
        raise ConfigError(
            f"engine.backward takes the scalar loss of one micro-batch, with its graph; it got {found}. Where the "
            "module returns no loss (no labels?), compute one from its output; take the mean of several values."
        )

    def check(self) -> None:
        """Raises ConfigError after a pass that failed, until its gradients are discarded."""
        if self._failed:
            raise ConfigError(
                "The last engine.backward failed, so the gradients of this step are incomplete. engine.zero_grad() "
                "discards them, on every rank; then the step begins again with its first micro-batch."
            )

    def exchange_the_rest(self) -> None:
        """Takes part in the exchanges of passes that this rank leaves out: other ranks may make them."""
        while not self.complete:
            self.passes += 1
            self._engine.gradients_arrived(0, last=self.complete)

    def end(self) -> torch.Tensor:
        """Ends the step, and returns this rank's share of its loss: the next pass begins another."""
        loss, self.loss = self.loss, torch.zeros_like(self.loss)
        self.passes, self._failed, self._state.pending = 0, False, False
        return loss
