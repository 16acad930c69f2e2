"""Plain state of training: the outcome of a step, and the progress of a run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one optimizer step, the same on every rank.

    Attributes:
        loss: the mean loss over `num_tokens` tokens.
        grad_norm: the norm of the whole gradient before it is clipped.
        lr: the learning rate.
        num_tokens: the number of tokens of the global batch that the loss counts.
        stop: whether a rank was asked to stop.
        balance_loss: the routers' load-balancing loss, a mean over sequences, which `loss` leaves out.
        z_loss: the routers' z-loss, a mean over tokens, which `loss` leaves out.
        loss_scale: the loss scale with which the step was computed.
        updated: whether parameters were updated; False if the loss or the gradient was not finite.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    stop: bool
    balance_loss: float = 0.0
    z_loss: float = 0.0
    loss_scale: float = 1.0
    updated: bool = True


@dataclass(frozen=True, slots=True)
class TrainState:
    """The progress of a run: the numbers of steps taken, tokens learned and rows read so far."""

    step: int = 0
    tokens: int = 0
    samples: int = 0

    def advance(self, num_tokens: int, num_samples: int) -> "TrainState":
        """Returns the state after one more step."""
        return TrainState(self.step + 1, self.tokens + num_tokens, self.samples + num_samples)
