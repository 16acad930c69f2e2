"""The learning rate as a pure function of the number of updates.

A step that updates nothing, for example because fp16 overflowed, does not move the schedule, as in torch's loop of
GradScaler and scheduler: a warm-up has as many updates as it is long.
"""

import math

from ..config.sections import OptimizerSection


def learning_rate(updates: int, num_steps: int, options: OptimizerSection) -> float:
    """Returns the rate after so many updates: linear warm-up to lr, then the schedule, which ends at lr x min_lr_ratio.

    "wsd" (warm-up, stable, decay: arXiv 2404.06395) stays at lr and falls in a line over the last `decay_share` of all
    steps: a run that was stopped before them can go on to any number of steps.
    """
    if updates < options.warmup_steps:
        return options.lr * (updates + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    first = options.warmup_steps
    if options.schedule == "wsd":
        first = max(first, num_steps - 1 - max(1, round(options.decay_share * num_steps)))
    progress = max(0.0, (updates - first) / max(1, num_steps - 1 - first))
    remaining = (1 + math.cos(math.pi * min(1.0, progress))) / 2 if options.schedule == "cosine" else 1 - progress
    low = options.lr * options.min_lr_ratio
    return low + (options.lr - low) * max(0.0, remaining)
