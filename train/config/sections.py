"""The sections of the training configuration: every key with its type, default and bounds (no torch)."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from ...core.config import PathKey, Section
from ...core.dtypes import Precision
from ...model.config import refuse_foreign_options
from ...model.shape import ModelKeys


class ModelSection(ModelKeys):
    """`[model]` as it is written: either keys, or `init`, a checkpoint that gives the run shape, weights and tokenizer.

    With `init`, the other keys are not used, and not written. `initial_model.resolve` makes the model's shape.
    """

    init: PathKey | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_or_the_other(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("init"):
            keys = [key for key in data if key != "init"]
            if keys:
                raise ValueError(
                    f"init = {data['init']!r} takes the model's shape from its checkpoint: leave out "
                    f"{', '.join(keys)}, or init"
                )
        return data

    @model_validator(mode="after")
    def _has_own_options_only(self) -> Self:
        refuse_foreign_options(self)
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"init": self.init} if self.init else handler(self)


_SOURCES_FORM: Final = 'name folders that `tk data prepare` made, sources = [{ path = "tokens" }]'


class DataSource(Section):
    """One source of a mixture: a token folder, or Megatron's files PATH.bin and PATH.idx."""

    path: PathKey
    weight: float = Field(default=1.0, gt=0)


class DataSection(Section):
    """The training data and how it is cut into rows.

    Attributes:
        sources: token folders (`tk data prepare`), or "stdlib": the source files of Python's standard library, prepared
            on first use.
        tokenizer: the folder with the tokenizer.json that goes into the checkpoint; None takes the tokenizer of
            `model.init`, or else that of the first source.
        packing: "concat" cuts the stream of all documents into rows; "documents" packs whole documents, which neither
            attend to each other nor share positions.
        vocab_size: the vocabulary size of the tokenizer that is trained for "stdlib".
        eval_fraction: the share of the rows that is held out for evaluation.
        cache: the folder in which "stdlib" is prepared.
    """

    sources: Annotated[
        Annotated[Literal["stdlib"], Tag("<name>")] | Annotated[tuple[DataSource, ...], Tag("<array>")],
        Discriminator(lambda value: "<name>" if isinstance(value, str) else "<array>"),
    ] = "stdlib"
    tokenizer: PathKey | None = None
    packing: Literal["concat", "documents"] = "concat"
    vocab_size: int = Field(default=4096, ge=300)
    eval_fraction: float = Field(default=0.02, gt=0, lt=0.5)
    cache: PathKey = "runs/stdlib"

    @field_validator("sources", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        names = [value] if isinstance(value, str) and value != "stdlib" else value if isinstance(value, list) else []
        if bare := [name for name in names if isinstance(name, str)]:
            raise ValueError(f"{bare[0]!r} is a text, not an array of tables; {_SOURCES_FORM}")
        if value in ([], ()):
            raise ValueError(f'there is no data to train on; {_SOURCES_FORM}, or "stdlib"')
        return tuple(value) if isinstance(value, list) else value


class TrainSection(Section):
    """Length, batch size and behaviour of the run.

    Attributes:
        steps: the number of optimizer steps of the run.
        global_batch_size: the number of sequences per step, over all ranks.
        micro_batch_size: the number of sequences per forward and backward pass of a rank.
        seq_len: the number of tokens per sequence.
        log_every, eval_every: steps between two log lines, or two evaluations; 0 evaluates never.
        eval_rows: the number of held-out rows per evaluation.
        on_nonfinite: the reaction to a loss or gradient norm that is not finite: "stop" ends the run, "skip" leaves
            the step out.
        max_skipped_steps: the number of steps in a row that may be left out; one more ends the run.
        freeze: patterns of parameters that are not trained (see train/config/freezing.py).
        router_bias_update_rate: the change per step of the biases by which routers choose experts; 0 leaves them.
        router_z_loss_coef: the weight of the routers' z-loss (see model/balance.py); 0 leaves it out.
        stop_timeout: seconds in which ranks must finish their step and save after they are asked to stop.
        compile: whether layers are compiled with torch.compile at the first step.
        deterministic: whether GPUs use only algorithms that give the same bits every time; CPUs always do.
        profile: "A:B" traces steps A to B, both included; "" traces none.
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
    router_bias_update_rate: float = Field(default=0.0, ge=0)
    router_z_loss_coef: float = Field(default=0.0, ge=0)
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
        """The steps to trace, counted from 1."""
        first, _, last = self.profile.partition(":")
        return range(int(first), int(last) + 1) if self.profile else range(0)

    @field_validator("freeze", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class OptimizerSection(Section):
    """AdamW (arXiv 1711.05101) and the learning-rate schedule.

    Attributes:
        lr: the peak learning rate, reached after `warmup_steps`.
        min_lr_ratio: the learning rate at the end of a schedule that falls, as a share of `lr`.
        weight_decay: for tensors with 2 or more dims only.
        grad_clip: the largest gradient norm; larger gradients are scaled down to it. 0 clips nothing.
        states: the dtype of both moments. In bf16 exp_avg is rounded to the nearest and exp_avg_sq stochastically, by
            random bits that depend on train.seed, tensor, element and step alone; masters stay fp32.
        decay_share: the share of all steps during which the schedule "wsd" falls, at the end of the run.
    """

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    states: Literal["fp32", "bf16"] = "fp32"
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
    """The dtype of parameters, and the loss scale of fp16. Masters and the gradient reduction are always fp32.

    Attributes:
        params: the dtype of parameters and activations.
        tf32: whether GPUs may round the operands of fp32 products to TF32's 10 bits, several times as fast.
        initial_loss_scale: for fp16, the first factor of the loss before backward.
        loss_scale_window: for fp16, the number of steps without overflow after which the factor doubles; an overflow
            halves it.
        min_loss_scale: for fp16, the smallest factor. An overflow at this factor counts as a non-finite step.
    """

    params: Precision = "fp32"
    tf32: bool = False
    initial_loss_scale: float = Field(default=65536.0, ge=1)
    loss_scale_window: int = Field(default=1000, ge=1)
    min_loss_scale: float = Field(default=1.0, gt=0)


class ParallelSection(Section):
    """The number of ranks along each mesh axis, and the pipeline's schedule.

    Attributes:
        tp, pp, cp, dp: the number of ranks along each axis; dp = "auto" is the number of started ranks /
            (tp x pp x cp).
        cp_mode: how attention over cp ranks gets the keys of other ranks: "gather" fetches them, "ulysses" exchanges
            positions for heads, of which cp must divide those of a tp rank; "auto" takes what moves fewer bytes.
        ep: the number of ranks with different experts, among all ranks of a pipeline stage, so it may exceed dp.
        expert_tp: the number of ranks over which an expert is split; 0 = tp at ep 1, else 1.
        sequence_parallel: whether hidden states are split over tp along the sequence between tensor-parallel blocks.
        schedule: the order of forward and backward passes in the pipeline.
        num_virtual_stages: the number of stages (runs of layers) per pipeline rank, for "interleaved" and "gpipe".
        timeout_seconds: seconds after which a rank that waits for another rank ends with an error.
    """

    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    dp: int | Literal["auto"] = "auto"
    cp_mode: Literal["auto", "gather", "ulysses"] = "auto"
    ep: int = Field(default=1, ge=1)
    expert_tp: int = Field(default=0, ge=0)
    sequence_parallel: bool = False
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    num_virtual_stages: int = Field(default=1, ge=1)
    timeout_seconds: float = Field(default=600.0, gt=0, le=86400)


class ZeroSection(Section):
    """Sharding over data-parallel ranks (ZeRO, arXiv 1910.02054).

    Attributes:
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters; 0 shards nothing.
        bucket_size: the number of elements that are exchanged at once; at stage 3 a bucket holds one layer at most.
        buckets: "layer" = buckets of whole layers, of which a larger one exceeds `bucket_size`; "size" = none but a
            larger parameter exceeds it; "auto" = "layer" on GPUs that hold all model states.
        overlap: whether buckets are exchanged while backward goes on; at stage 3 also whether the next layer is
            gathered while one computes.
        shard_size: the number of ranks that share one copy, a divisor of dp (hybrid sharding); 0 = all of dp.
    """

    stage: Literal[0, 1, 2, 3] = 0
    bucket_size: int = Field(default=2**24, ge=1)
    buckets: Literal["auto", "layer", "size"] = "auto"
    overlap: bool = True
    shard_size: int = Field(default=0, ge=0)


Tier = Literal["none", "cpu", "disk"]


class OffloadSection(Section):
    """The parts of a rank's model states, and the activations, that leave the memory of its device.

    Attributes:
        optimizer: the place of the optimizer's states: "none" is the device, "cpu" the host's memory, "disk" a file.
        gradients: the place of the sum of a step's gradients, between backward passes.
        parameters: the place of a rank's part of the parameters at ZeRO stage 3, while no module computes with them.
        activations: the place of what a forward pass keeps for its backward, between the two.
        folder: for "disk", the folder of the file, on a fast disk of each host; the file has no name there and ends
            with the process. None takes the run folder.
        buffers: for "disk", the number of buffers of 4 to 16 MiB through which states are read and written.
    """

    optimizer: Tier = "none"
    gradients: Tier = "none"
    parameters: Tier = "none"
    activations: Literal["none", "cpu"] = "none"
    folder: PathKey | None = None
    buffers: int = Field(default=8, ge=3, le=1024)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for key in ("gradients", "parameters"):
            if getattr(self, key) != "none" and self.optimizer == "none":
                raise ValueError(
                    f'{key} = "{getattr(self, key)}" needs optimizer = "cpu" or "disk": the optimizer\'s states leave '
                    "the device first"
                )
        return self

    def problem_at(self, stage: int) -> str:
        """Returns why these options do not fit a ZeRO stage, or ""."""
        if self.parameters == "none" or stage == 3:
            return ""
        return (
            f'offload.parameters = "{self.parameters}" needs ZeRO stage 3, at which a rank keeps a part of the '
            f"parameters; the stage is {stage}. Set the stage to 3, or leave offload.parameters out."
        )


RESIDENT: Final = OffloadSection()


class RecomputeSection(Section):
    """Activation recomputation in backward.

    Attributes:
        mode: "none" keeps all activations; "selective" recomputes attention and the MLP's activations; "full"
            recomputes everything inside a layer.
        mlp_block: the positions of a rank that a dense MLP computes at once, and again in backward; 0 = all.
    """

    mode: Literal["none", "selective", "full"] = "none"
    mlp_block: int = Field(default=0, ge=0)


class CheckpointSection(Section):
    """The run folder and the steps that are kept in it.

    Attributes:
        dir: the run folder.
        every: the number of steps between saves; 0 saves only at the end and when the run is stopped.
        keep: the number of newest steps that are kept; 0 keeps all.
        keep_every: steps divisible by it are never deleted; 0 protects none.
        async_save: whether training goes on while a step is written. The copy that is written takes as much memory as
            the rank's share of a checkpoint. The last save always waits.
    """

    dir: PathKey
    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=0)
    keep_every: int = Field(default=0, ge=0)
    async_save: bool = True


class MetricsSection(Section):
    """Records beside metrics.jsonl.

    Attributes:
        tensorboard: whether to write event files to the run folder's tensorboard/ (needs the extra `tensorboard`).
    """

    tensorboard: bool = False
