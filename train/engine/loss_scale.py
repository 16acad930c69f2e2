"""Dynamic loss scaling for fp16 (Mixed precision training, arXiv 1710.03740, section 3.2): plain numbers, no torch."""

from dataclasses import dataclass

from ..config.sections import PrecisionSection
from ..state.stored_state import LossScaleState


@dataclass(slots=True)
class LossScale:
    """The factor of the loss in backward; the same on every rank, since an overflow counts on all ranks.

    Attributes:
        options: the bounds of the factor.
        value: the factor; always 1 if parameters are not fp16.
        good_steps: the number of steps without overflow since the factor last changed.
    """

    options: PrecisionSection
    value: float = 1.0
    good_steps: int = 0

    @staticmethod
    def of(options: PrecisionSection) -> "LossScale":
        """Returns the scale of a new run."""
        return LossScale(options, options.initial_loss_scale if options.params == "fp16" else 1.0)

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow lowers the scale, rather than being a non-finite step like any other."""
        return self.options.params == "fp16" and self.value > self.options.min_loss_scale

    def overflowed(self) -> None:
        """Halves the scale, down to the smallest allowed."""
        self.value, self.good_steps = max(self.value / 2, self.options.min_loss_scale), 0

    def succeeded(self) -> None:
        """Counts a step without overflow; after a whole window of them the scale doubles."""
        if self.options.params != "fp16":
            return
        self.good_steps += 1
        if self.good_steps == self.options.loss_scale_window:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def state(self) -> LossScaleState | None:
        """The state that a checkpoint stores; None if parameters are not fp16."""
        return LossScaleState(self.value, self.good_steps) if self.options.params == "fp16" else None

    def restore(self, stored: LossScaleState | None) -> None:
        """Restores the state from a checkpoint of an fp16 run, even below `min_loss_scale`; other runs start anew."""
        if self.options.params == "fp16" and stored:
            self.value, self.good_steps = stored.value, stored.good_steps
