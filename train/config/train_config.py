"""The training configuration: all sections of the TOML file, the checks across them, and its layout (no torch)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from ...core.config import Section
from ...core.errors import ParallelError
from ...core.layout import Layout
from ...core.tensors import Table
from .lora import LoraSection
from .other_names import OTHER_NAMES
from .sections import (
    CheckpointSection,
    DataSection,
    MetricsSection,
    ModelSection,
    OffloadSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    RecomputeSection,
    TrainSection,
    ZeroSection,
)


class TrainConfig(Section):
    """The configuration of one training run. `load_toml(path, TrainConfig, overrides)` reads it."""

    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    lora: LoraSection | None = None
    optimizer: OptimizerSection = OptimizerSection()
    precision: PrecisionSection = PrecisionSection()
    parallel: ParallelSection = ParallelSection()
    zero: ZeroSection = ZeroSection()
    offload: OffloadSection = OffloadSection()
    recompute: RecomputeSection = RecomputeSection()
    checkpoint: CheckpointSection
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if not self.model.init and self.train.seq_len > self.model.context_length:
            raise ValueError(
                f"train.seq_len = {self.train.seq_len} exceeds model.{self.model.context_text}; lower the first, or "
                "raise the second"
            )
        if self.optimizer.warmup_steps > self.train.steps:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} exceeds train.steps = {self.train.steps}: the "
                "run would end before the learning rate reaches optimizer.lr"
            )
        if self.lora is not None and self.train.router_bias_update_rate:
            raise ValueError(
                f"train.router_bias_update_rate = {self.train.router_bias_update_rate:g} changes routers of the base, "
                "which [lora] leaves as it is: leave out one of the two"
            )
        if self.lora is not None and self.lora.base_bits and self.zero.stage == 3:
            raise ValueError(
                f'lora.base = "{self.lora.base}" keeps the base in codes on every rank, and zero.stage = 3 spreads it: '
                'use a stage of 0 to 2, or base = "auto"'
            )
        if problem := self.offload.problem_at(self.zero.stage):
            raise ValueError(problem.removesuffix("."))
        parallel = self.parallel
        many = parallel.num_virtual_stages > 1
        if (parallel.schedule == "interleaved" and not many) or (parallel.schedule in ("1f1b", "zb-h1") and many):
            raise ValueError(
                f'parallel.schedule = "{parallel.schedule}" with num_virtual_stages = {parallel.num_virtual_stages}: '
                '"interleaved" needs 2 or more, "1f1b" and "zb-h1" take 1, "gpipe" any number'
            )
        if parallel.sequence_parallel and parallel.cp == 1 and self.train.seq_len % parallel.tp:
            raise ValueError(
                f"parallel.sequence_parallel needs train.seq_len % parallel.tp = {self.train.seq_len} % {parallel.tp} "
                f"= 0, not {self.train.seq_len % parallel.tp}; use a multiple of {parallel.tp}"
            )
        return self

    @property
    def run_folder(self) -> Path:
        """The folder of the run's steps and of metrics.jsonl."""
        return Path(self.checkpoint.dir)

    def layout(self, num_ranks: int | None, on_gpu: bool = False) -> Layout:
        """Returns the layout over `num_ranks` ranks; None = tp x pp x cp x dp ranks (dp "auto" is then 1).

        Args:
            on_gpu: whether ranks compute on GPUs, for `zero.buckets`.

        Raises:
            ParallelError: tp x pp x cp x dp is not `num_ranks`, or ep, expert_tp or shard_size does not fit them.
        """
        parallel, dp = self.parallel, self.parallel.dp
        axes = {"tp": parallel.tp, "pp": parallel.pp} | ({"cp": parallel.cp} if parallel.cp > 1 else {})
        names, sizes, of_one = " x ".join(axes), " x ".join(map(str, axes.values())), math.prod(axes.values())
        if num_ranks is None:
            num_ranks = of_one * (1 if dp == "auto" else dp)
        if dp == "auto":
            if num_ranks % of_one:
                raise ParallelError(
                    f"[parallel]: the number of ranks % ({names}) = {num_ranks} % ({sizes}) = {num_ranks % of_one} "
                    f"must be 0. Start a multiple of {of_one} ranks, or change {' or '.join(axes)}."
                )
            dp = num_ranks // of_one
        if of_one * dp != num_ranks:
            raise ParallelError(
                f"[parallel] {names} x dp = {sizes} x {dp} = {of_one * dp} ranks, but the job has "
                f'{num_ranks}. Change --nproc, or set dp = "auto".'
            )
        try:
            return Layout(
                tp=parallel.tp,
                pp=parallel.pp,
                dp=dp,
                cp=parallel.cp,
                ep=parallel.ep,
                expert_tp=parallel.expert_tp,
                virtual_stages=parallel.num_virtual_stages,
                shard_size=self.zero.shard_size,
                zero=self.zero.stage,
                bucket_size=self.zero.bucket_size,
                layer_buckets=self._joins_layers(on_gpu),
            )
        except ParallelError as error:
            raise ParallelError(f"[parallel] and [zero]: {error}") from error

    def _joins_layers(self, on_gpu: bool) -> bool:
        """Whether buckets hold whole layers. Offload moves parts of buckets, so that large ones take more buffers."""
        rule = self.zero.buckets
        return on_gpu and self.offload.optimizer == "none" if rule == "auto" else rule == "layer"


def param_groups(options: OptimizerSection, table: Table) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups as a checkpoint stores them: tensors with and without weight decay.

    Frozen tensors are in neither group.
    """
    stored = [spec for spec in table if spec.trainable and not spec.alias]
    return [
        {
            "name": options.name,
            "lr": options.lr,
            "betas": list(options.betas),
            "eps": options.eps,
            "weight_decay": options.weight_decay if decay else 0.0,
            "params": [spec.name for spec in stored if (len(spec.shape) >= 2) == decay],
        }
        for decay in (True, False)
    ]
