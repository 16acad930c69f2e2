"""The training loop: rows in, one optimizer step after another, metrics and checkpoints out."""

import math
from collections.abc import Callable

import torch

from ..core.errors import TkError
from ..core.layout import TensorSpec
from ..model.decoder import Decoder
from ..model.init import initialize_weights
from ..model.registry import tensor_table
from ..parallel.collectives import all_reduce
from ..parallel.mesh import Mesh
from .config import TrainConfig
from .data.batches import global_batch
from .evaluate import evaluate
from .flat_buffers import FlatBuffers
from .heartbeat import Heartbeat
from .inputs import Inputs, open_inputs
from .loss import loss_sum
from .lr_schedule import learning_rate
from .metrics import MetricsFile
from .run_state import RunState, TrainState
from .sharded_adamw import ShardedAdamW
from .snapshot import Snapshot
from .step_log import StepLog, StepResult
from .stop import StopRequest


class Trainer:
    """Trains one model on this rank's part of a mesh.

    Args:
        config: the whole run.
        mesh: groups of this rank; alone if None.
        resume: "auto" continues the run folder's newest committed step, "never" starts at 0 and refuses a run folder
            that has steps, anything else is a checkpoint to continue from.
        fork: steps of the run folder that are newer than the checkpoint to continue from are moved aside, not refused.
        stop: asked at every step's end.
        on_step: called after every step with its number (1-based) and result.
        heartbeat: told what this rank does, whenever it begins something else.

    Raises:
        TkError: bad configuration, data or checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh | None = None,
        device: torch.device | None = None,
        *,
        resume: str = "auto",
        fork: bool = False,
        stop: StopRequest | None = None,
        on_step: Callable[[int, StepResult], None] = lambda step, result: None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.config = config
        self.mesh = mesh or Mesh.alone()
        self.device = device or torch.device("cpu")
        self.resume = resume
        self.fork = fork
        self.stop = stop or StopRequest()
        self.on_step = on_step
        self.heartbeat = heartbeat or Heartbeat()
        self.dtype = torch.bfloat16 if config.precision.params == "bf16" else torch.float32
        self.inputs: Inputs = open_inputs(config, self.mesh, self.device)
        self.table: tuple[TensorSpec, ...] = tensor_table(self.inputs.model)
        self.decoder = Decoder(self.inputs.model, self.mesh.tp, dtype=self.dtype, device=self.device)
        initialize_weights(self.decoder, config.train.seed)
        self.buffers = FlatBuffers(self.decoder, self.table, self.mesh)
        self.optimizer = ShardedAdamW(self.buffers, config.optimizer)
        self.snapshot = Snapshot(self.decoder, self.optimizer, self.table)
        self.state = TrainState()

    def fit(self) -> TrainState:
        """Trains to `train.steps` or until stopped, saving at the end either way. Returns where it ended."""
        self.heartbeat.beat("loading")
        with RunState.open(self) as run:
            self.state = run.load(self.resume, self.fork)
            folder, step = self.config.run_folder, self.state.step
            events = self.config.metrics.tensorboard
            metrics = MetricsFile(folder, step, run.attempt, events) if self.mesh.world.rank == 0 else None
            try:
                self._loop(run, metrics)
            finally:
                if metrics:
                    metrics.close()
        return self.state

    def _loop(self, run: RunState, metrics: MetricsFile | None) -> None:
        options = self.config.train
        with StepLog(self, metrics) as log:
            while self.state.step < options.steps:
                result = self.step()
                last = self.state.step == options.steps or result.stop
                log.record(self.state, result, last)
                self.on_step(self.state.step, result)
                every = self.config.checkpoint.every
                if last or (every and self.state.step % every == 0):
                    self.heartbeat.beat("save")
                    run.save(self.state, last)
                if result.stop:
                    return
                if last or (options.eval_every and self.state.step % options.eval_every == 0):
                    self.heartbeat.beat("evaluate")
                    log.record_evaluation(self.state.step, evaluate(self))

    def step(self) -> StepResult:
        """One optimizer step on the next global batch.

        Raises:
            TkError: the loss or the gradient norm is not finite; parameters and states are as before the step.
        """
        options, beat = self.config, self.heartbeat.beat
        beat("data", self.state.step + 1)
        lr = learning_rate(self.state.step, options.train.steps, options.optimizer)
        micro_batches = global_batch(
            self.inputs.train,
            self.state.samples,
            options.train.global_batch_size,
            self.mesh.coordinates.dp,
            self.mesh.layout.dp,
            options.train.micro_batch_size,
        )
        num_tokens = self._count_tokens(sum(int(micro.num_valid) for micro in micro_batches))
        self.buffers.zero_grads()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in micro_batches:
            tokens, targets = (torch.from_numpy(rows).to(self.device) for rows in (micro.inputs, micro.targets))
            beat("forward")
            loss = loss_sum(self.decoder, tokens, targets) / num_tokens
            beat("backward")
            loss.backward()
            total += loss.detach()
        beat("reduce")
        self.buffers.reduce_grads()
        loss_value, grad_norm, stop = self._agree(total)
        if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
            raise TkError(
                f"Step {self.state.step + 1}: loss {loss_value}, gradient norm {grad_norm}; both must be finite. "
                "Nothing was updated. Lower the learning rate, or look at the batch's rows."
            )
        clip = options.optimizer.grad_clip
        scale = min(1.0, clip / (grad_norm + 1e-6)) if clip else 1.0
        beat("optimizer")
        self.optimizer.step(lr, scale)
        self.state = self.state.advance(num_tokens, options.train.global_batch_size)
        return StepResult(loss_value, grad_norm, lr, num_tokens, stop)

    def _count_tokens(self, num_valid: int) -> int:
        """Valid tokens of the global batch, from this data-parallel rank's."""
        count = torch.tensor(float(num_valid if self.mesh.tp.rank == 0 else 0), dtype=torch.float64, device=self.device)
        return int(all_reduce(count, self.mesh.world))

    def _agree(self, local_loss: torch.Tensor) -> tuple[float, float, bool]:
        """Loss, gradient norm and whether anybody was asked to stop, the same bits on every rank."""
        values = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self.mesh.tp.rank == 0:
            values[0] = local_loss
        values[1] = self.buffers.owned_grad_square_sum() / self.mesh.replicate.size
        values[2] = float(self.stop.requested)
        loss, square_sum, stop = all_reduce(values, self.mesh.world).tolist()
        return loss, math.sqrt(square_sum) if square_sum >= 0 else math.nan, stop > 0
