"""The learning rate as a pure function of the step."""

import math

from .config import OptimizerSection


def learning_rate(step: int, num_steps: int, options: OptimizerSection) -> float:
    """The rate of 0-based `step`: linear warm-up to lr, then the schedule down to lr x min_lr_ratio at the last one."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    progress = (step - options.warmup_steps) / max(1, num_steps - 1 - options.warmup_steps)
    remaining = 1 - progress if options.schedule == "linear" else (1 + math.cos(math.pi * min(1.0, progress))) / 2
    low = options.lr * options.min_lr_ratio
    return low + (options.lr - low) * max(0.0, remaining)
