"""The training configuration: every section and key of the TOML file, with defaults and checks (no torch)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from ...core.config import Section
from ...core.dtypes import Precision
from ...core.errors import ParallelError
from ...core.layout import Layout
from ...core.tensors import Table
from ...model.config import ModelConfig


class ModelSection(ModelConfig):
    """A shape, or `init`: the checkpoint whose shape, weights and tokenizer the run begins with.

    Read from TOML, a section with `init` has no shape yet; `initial_model.resolve` gives it the checkpoint's. It is
    handed to ranks as it was read.
    """

    init: str = ""

    @model_validator(mode="before")
    @classmethod
    def _one_or_the_other(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("init"):
            keys = [key for key in data if key != "init"]
            if keys:
                raise ValueError(
                    f"init = {data['init']!r} brings the shape of its checkpoint: leave out {', '.join(keys)}, or init"
                )
        return data

    @model_serializer(mode="wrap")
    def _as_read(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"init": self.init} if self.init else handler(self)

    @property
    def is_known(self) -> bool:
        """Whether the shape is: not before a checkpoint has given it."""
        return not self.init or self.vocab_size > 0

    def with_shape(self, shape: ModelConfig) -> "ModelSection":
        """This section with the shape of its checkpoint."""
        return self.model_copy(update={name: getattr(shape, name) for name in ModelConfig.model_fields})

    def shape(self) -> ModelConfig:
        """The shape alone."""
        return ModelConfig(**{name: getattr(self, name) for name in ModelConfig.model_fields})


class DataSource(Section):
    """One source of a mixture: a token folder, or Megatron's files PATH.bin and PATH.idx."""

    path: str
    weight: float = Field(default=1.0, gt=0)


class DataSection(Section):
    """Where rows come from.

    Attributes:
        sources: token folders (`tk data prepare`), or the one word "stdlib": Python's own library, prepared on first
            use under `cache`.
        tokenizer: folder with tokenizer.json that goes into the checkpoint; "" takes that of `model.init`, or the first
            source's own.
        packing: "concat" cuts the stream of all documents into rows; "documents" packs whole ones, which neither attend
            to each other nor share positions.
        vocab_size: of the tokenizer that "stdlib" trains.
        eval_fraction: held-out share of the rows, never trained on.
        cache: where "stdlib" is prepared.
    """

    sources: Annotated[
        Annotated[Literal["stdlib"], Tag("<name>")]
        | Annotated[tuple[DataSource, ...], Field(min_length=1), Tag("<array>")],
        Discriminator(lambda value: "<name>" if isinstance(value, str) else "<array>"),
    ] = "stdlib"
    tokenizer: str = ""
    packing: Literal["concat", "documents"] = "concat"
    vocab_size: int = Field(default=4096, ge=300)
    eval_fraction: float = Field(default=0.02, gt=0, lt=0.5)
    cache: str = "runs/stdlib"

    @field_validator("sources", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class TrainSection(Section):
    """The run itself.

    Attributes:
        on_nonfinite: what happens when loss or gradient norm are not finite: the run ends, or the step is left out.
        max_skipped_steps: steps left out in a row, after which the run ends all the same.
        freeze: patterns of parameters that stay as they are (see train/config/freezing.py).
        stop_timeout: seconds that ranks get to finish a step and save once asked to stop.
        compile: whether the layers go through torch.compile at the first step.
        deterministic: whether a GPU only uses algorithms that give the same bits every time; a CPU always does.
        profile: "A:B" traces steps A to B, both included; "" none.
    """

    steps: int = Field(default=100, ge=1)
    global_batch_size: int = Field(default=8, ge=1)
    micro_batch_size: int = Field(default=4, ge=1)
    seq_len: int = Field(default=256, ge=2)
    seed: int = Field(default=0, ge=0)
    log_every: int = Field(default=10, ge=1)
    eval_every: int = Field(default=0, ge=0)
    eval_rows: int = Field(default=32, ge=1)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped_steps: int = Field(default=10, ge=1)
    freeze: tuple[str, ...] = ()
    stop_timeout: float = Field(default=120.0, gt=0, le=86400)
    compile: bool = False
    deterministic: bool = False
    profile: str = ""

    @field_validator("profile")
    @classmethod
    def _is_range(cls, value: str) -> str:
        first, _, last = value.partition(":")
        if value and not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError('it must be "A:B", the first and the last step to trace, as in "10:13"')
        return value

    @property
    def profiled_steps(self) -> range:
        """The steps to trace, 1-based."""
        first, _, last = self.profile.partition(":")
        return range(int(first), int(last) + 1) if self.profile else range(0)

    @field_validator("freeze", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class OptimizerSection(Section):
    """AdamW (arXiv 1711.05101) and the learning rate's course.

    Attributes:
        decay_share: of all steps, how many the schedule "wsd" falls for at the end.
    """

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, ge=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    decay_share: float = Field(default=0.2, gt=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)

    @field_validator("betas", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("betas")
    @classmethod
    def _in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must be in [0, 1)")
        return value


class PrecisionSection(Section):
    """Number formats: parameters; their masters and the gradient reduction are fp32.

    Attributes:
        initial_loss_scale: fp16 only, as the next two: what the loss is multiplied by before backward.
        loss_scale_window: steps without overflow after which the scale doubles; an overflow halves it.
        min_loss_scale: an overflow at this scale is a non-finite step like any other.
    """

    params: Precision = "fp32"
    initial_loss_scale: float = Field(default=65536.0, ge=1)
    loss_scale_window: int = Field(default=1000, ge=1)
    min_loss_scale: float = Field(default=1.0, gt=0)


class ParallelSection(Section):
    """Ranks by mesh axis; dp = "auto" takes what tp and pp leave of the ranks that were started.

    Attributes:
        sequence_parallel: between tensor-parallel blocks, hidden states are split over tp along the sequence.
        schedule: order of forward and backward passes over the pipeline.
        num_virtual_stages: runs of layers per pipeline rank ("interleaved" and "gpipe").
        timeout_seconds: after which a rank that waits for another gives up.
    """

    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    dp: int | Literal["auto"] = "auto"
    sequence_parallel: bool = False
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    num_virtual_stages: int = Field(default=1, ge=1)
    timeout_seconds: float = Field(default=600.0, gt=0, le=86400)


class ZeroSection(Section):
    """What data-parallel ranks share out (ZeRO, arXiv 1910.02054): from stage 1 on optimizer states, from 2 on
    gradients, from 3 on parameters.

    Attributes:
        bucket_size: elements that are exchanged at once; at stage 3 a layer is never mixed with another.
        overlap: buckets are exchanged while backward goes on; at stage 3 the next layer is gathered ahead.
        shard_size: ranks that one copy is spread over, a divisor of dp (hybrid sharding); 0 = all of dp.
    """

    stage: Literal[0, 1, 2, 3] = 0
    bucket_size: int = Field(default=2**24, ge=1)
    overlap: bool = True
    shard_size: int = Field(default=0, ge=0)


class RecomputeSection(Section):
    """What backward computes again instead of keeping it: nothing, attention and activations of the MLP, or all that
    is inside a layer."""

    mode: Literal["none", "selective", "full"] = "none"


class CheckpointSection(Section):
    """The run folder and which steps stay in it.

    Attributes:
        every: steps between saves; 0 = only at the end and when stopped.
        keep: newest steps kept; 0 = all.
        keep_every: steps divisible by it are never pruned; 0 = none.
        async_save: training goes on while a step is written, from a copy that takes as much memory as the rank's share
            of a checkpoint; the last save always waits.
    """

    dir: str = Field(min_length=1)
    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=0)
    keep_every: int = Field(default=0, ge=0)
    async_save: bool = True


class MetricsSection(Section):
    """What is recorded beside metrics.jsonl.

    Attributes:
        tensorboard: event files in the run folder's tensorboard/ (the extra of that name).
    """

    tensorboard: bool = False


class TrainConfig(Section):
    """One training run. `load_toml(path, TrainConfig, overrides)` reads it."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    precision: PrecisionSection = PrecisionSection()
    parallel: ParallelSection = ParallelSection()
    zero: ZeroSection = ZeroSection()
    recompute: RecomputeSection = RecomputeSection()
    checkpoint: CheckpointSection
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.model.is_known and self.train.seq_len > self.model.max_position_embeddings:
            raise ValueError(
                f"train.seq_len = {self.train.seq_len} exceeds model.max_position_embeddings = "
                f"{self.model.max_position_embeddings}"
            )
        if self.optimizer.warmup_steps > self.train.steps:
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} exceeds train.steps = {self.train.steps}: the "
                "run would end before optimizer.lr is reached"
            )
        parallel = self.parallel
        many = parallel.num_virtual_stages > 1
        if (parallel.schedule == "interleaved" and not many) or (parallel.schedule in ("1f1b", "zb-h1") and many):
            raise ValueError(
                f'parallel.schedule = "{parallel.schedule}" with num_virtual_stages = {parallel.num_virtual_stages}: '
                '"interleaved" needs 2 or more, "1f1b" and "zb-h1" take 1, "gpipe" any number'
            )
        if parallel.sequence_parallel and self.train.seq_len % parallel.tp:
            raise ValueError(
                f"parallel.sequence_parallel needs train.seq_len % parallel.tp = {self.train.seq_len} % {parallel.tp} "
                f"= 0, not {self.train.seq_len % parallel.tp}; take a multiple of {parallel.tp}"
            )
        return self

    @property
    def run_folder(self) -> Path:
        """Where steps and metrics.jsonl go."""
        return Path(self.checkpoint.dir)

    def layout(self, num_ranks: int | None) -> Layout:
        """The layout over `num_ranks` ranks; None = as many as tp x pp x dp asks for (dp "auto" is then 1).

        Raises:
            ParallelError: tp x pp x dp is not that number.
        """
        tp, pp, dp = self.parallel.tp, self.parallel.pp, self.parallel.dp
        if num_ranks is None:
            num_ranks = tp * pp * (1 if dp == "auto" else dp)
        if dp == "auto":
            if num_ranks % (tp * pp):
                raise ParallelError(
                    f"ranks % (tp x pp) = {num_ranks} % ({tp} x {pp}) = {num_ranks % (tp * pp)} must be 0: start a "
                    f"multiple of {tp * pp} ranks, or change [parallel] tp or pp."
                )
            dp = num_ranks // (tp * pp)
        if tp * pp * dp != num_ranks:
            raise ParallelError(
                f"[parallel] tp x pp x dp = {tp} x {pp} x {dp} = {tp * pp * dp} ranks, but {num_ranks} are to be "
                'started: change --nproc, or set dp = "auto".'
            )
        return Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            virtual_stages=self.parallel.num_virtual_stages,
            shard_size=self.zero.shard_size,
            zero=self.zero.stage,
            bucket_size=self.zero.bucket_size,
        )


def param_groups(options: OptimizerSection, table: Table) -> list[dict[str, Any]]:
    """The optimizer's groups as a checkpoint stores them: with and without weight decay, frozen tensors in neither."""
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
