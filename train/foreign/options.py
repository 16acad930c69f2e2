"""The arguments of `initialize` beside the module: plain values, checked first; optimizer objects are refused."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field

from ...core.config import Section, parse
from ...core.dtypes import Precision
from ...core.errors import ConfigError, ParallelError
from ...core.layout import Layout
from ..config.sections import OffloadSection, OptimizerSection
from ..context.modes import Mode

Stage = Literal[0, 1, 2, 3]


class InitializeOptions(Section):
    """The arguments of `initialize` that have one value each; its docstring explains them."""

    zero: Stage = 0
    precision: Precision = "fp32"
    cp: int = Field(default=1, ge=1)
    cp_mode: Mode | Literal["auto"] = "auto"
    accumulate: int = Field(default=1, ge=1)
    steps: int = Field(default=0, ge=0)
    shard_size: int = Field(default=0, ge=0)
    bucket_size: int = Field(default=2**24, ge=1)
    overlap: bool = True
    offload: OffloadSection = OffloadSection()
    timeout_seconds: float = Field(default=600.0, gt=0, le=86400)

    def layout(self, world_size: int) -> Layout:
        """Returns the layout of a number of ranks; raises ParallelError unless cp divides it."""
        if world_size % self.cp:
            raise ParallelError(
                f"initialize(..., cp={self.cp}): {world_size} ranks were started, and cp must divide their number: "
                "dp = ranks / cp groups of ranks get batches of their own."
            )
        dp, size = world_size // self.cp, self.shard_size
        return Layout(dp=dp, cp=self.cp, zero=self.zero, shard_size=size, bucket_size=self.bucket_size)

    @staticmethod
    def of(**values: Any) -> "InitializeOptions":
        """Checks values; raises ConfigError, with the values that fit, for one of a wrong type or range."""
        options = parse(values, InitializeOptions, "initialize")
        if problem := options.offload.problem_at(options.zero):
            raise ConfigError(f"initialize: {problem}")
        if options.offload.optimizer == "disk" and options.offload.folder is None:
            raise ConfigError(
                'initialize: offload = {"optimizer": "disk"} needs a folder on a fast disk of this machine, for a file '
                'that ends with this process: add "folder": "/path".'
            )
        return options


def optimizer_section(optimizer: object, steps: int) -> OptimizerSection:
    """Returns the optimizer's options from the argument of a user.

    Raises:
        ConfigError: the argument is an optimizer of torch, a key or value is wrong, or the schedule needs `steps`.
    """
    if optimizer is None:
        optimizer = {}
    if isinstance(optimizer, Mapping):
        optimizer = parse({"schedule": "constant"} | dict(optimizer), OptimizerSection, "initialize's optimizer")
    if not isinstance(optimizer, OptimizerSection):
        raise ConfigError(_no_keys(optimizer))
    if optimizer.schedule != "constant" and not steps:
        raise ConfigError(
            f'schedule = "{optimizer.schedule}" needs the number of steps: pass initialize(..., steps=N).'
        )
    if 0 < steps < optimizer.warmup_steps:
        raise ConfigError(
            f"warmup_steps = {optimizer.warmup_steps} exceeds steps = {steps}: training would end before the rate "
            "reaches lr."
        )
    return optimizer


def _no_keys(optimizer: object) -> str:
    known = ", ".join(OptimizerSection.model_fields)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return f"initialize's optimizer is of type {kind.__name__}; it takes a mapping with some of the keys {known}."
    keys = {}
    for group in getattr(optimizer, "param_groups", [])[:1] if issubclass(kind, torch.optim.AdamW) else []:
        keys = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return (
        f"initialize's optimizer is torch's {kind.__name__}: initialize makes an AdamW of its own, sharded over ranks, "
        f"and takes its keys instead ({known}). Write initialize(model, {keys or {'lr': 1e-3}}, ...)."
    )
