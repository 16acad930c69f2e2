"""The training loop: rows in, one optimizer step after another, metrics and checkpoints out."""

import math
from collections.abc import Callable, Sequence

import torch

from ..core.layout import LocalParam
from ..data.batches import MicroBatch, global_batch
from ..model.init import fill_initial
from ..model.registry import tensor_table
from ..parallel.collectives import all_reduce
from ..parallel.mesh import Mesh
from ..parallel.weight_grads import WeightGradQueue
from .config.freezing import without_frozen
from .config.initial_model import resolve
from .config.train_config import TrainConfig
from .engine.compiling import compile_layers
from .engine.evaluate import evaluate
from .engine.lr_schedule import learning_rate
from .engine.nonfinite import NonFinitePolicy
from .engine.passes import Passes
from .engine.stages import build_stages, gathered_units
from .engine.training_engine import DTYPES, TrainingEngine
from .inputs import Inputs, open_inputs
from .launch.heartbeat import Heartbeat
from .launch.stop import StopRequest
from .records.metrics import MetricsFile
from .records.step_log import StepLog, StepResult
from .saving.run_state import RunState, TrainState
from .saving.snapshot import Snapshot


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
        self.config = config = resolve(config, resume)
        self.mesh = mesh or Mesh.alone(config.layout(1))
        self.device = device or torch.device("cpu")
        self.resume = resume
        self.fork = fork
        self.stop = stop or StopRequest()
        self.on_step = on_step
        self.heartbeat = heartbeat or Heartbeat()
        self.dtype = DTYPES[config.precision.params]
        self.inputs: Inputs = open_inputs(config, self.mesh, self.device)
        self.table = without_frozen(tensor_table(self.inputs.model), config.train.freeze)
        self.weight_grads = WeightGradQueue()
        self.engine = self._engine()
        self.pipeline = Passes(self.stages, self.engine, config, self.weight_grads, self.heartbeat.beat)
        self.nonfinite = NonFinitePolicy(config.train, self.engine)
        self.snapshot = Snapshot(self.engine.optimizer, self.table)
        self.before_update: Callable[[], None] = lambda: None  # ends what may read parameters and states until then
        self.state = TrainState()

    def _engine(self) -> TrainingEngine:
        parallel = self.config.parallel
        self.stages = build_stages(
            self.inputs.model,
            self.table,
            self.mesh,
            self.dtype,
            sequence_parallel=parallel.sequence_parallel,
            weight_grads=self.weight_grads,
            recompute=self.config.recompute.mode,
        )
        engine = TrainingEngine(
            self.stages,
            self.table,
            self.mesh,
            optimizer=self.config.optimizer,
            precision=self.config.precision,
            device=self.device,
            fill=self._fill,
            sequence_parallel=parallel.sequence_parallel,
            overlap=self.config.zero.overlap,
        )
        if self.config.zero.stage == 3:
            engine.gather_around(gathered_units(self.stages, engine.buffers), prefetch=self.config.zero.overlap)
        if self.config.train.compile:
            compile_layers(self.stages, self.config, self.device)
        return engine

    def _fill(self, local: LocalParam, parameter: torch.Tensor) -> None:
        """Initial values; none are drawn where `fit` will load a checkpoint's."""
        if not self.config.model.init:
            fill_initial(local, parameter, self.config.train.seed, self.inputs.model.initializer_range)

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
        """One optimizer step on the next global batch; one whose loss or gradient overflowed or is not finite leaves
        parameters and states as they were.

        Raises:
            TkError: the loss or the gradient norm is not finite, and `train.on_nonfinite` or the number of such steps
                in a row ends the run.
        """
        options, step, beat = self.config, self.state.step, self.heartbeat.beat
        beat("data", step + 1)
        lr = learning_rate(step, options.train.steps, options.optimizer)
        micro_batches = global_batch(
            self.inputs.train,
            self.state.samples,
            options.train.global_batch_size,
            self.mesh.coordinates.dp,
            self.mesh.layout.dp,
            options.train.micro_batch_size,
        )
        num_tokens = self._count_tokens(micro_batches)
        self.engine.begin_step()
        scale = self.engine.loss_scale.value
        local_loss = self.pipeline.train(micro_batches, scale / num_tokens) / scale
        beat("reduce")
        loss, grad_norm, balance_loss, stop = self._agree(local_loss, self.engine.finish_backward())
        updated = self.nonfinite.allows(step + 1, loss, grad_norm, local_loss)
        if updated:
            beat("optimizer")
            self.before_update()
            self.engine.update(lr, grad_norm)
        self.state = self.state.advance(num_tokens, options.train.global_batch_size)
        return StepResult(loss, grad_norm, lr, num_tokens, stop, balance_loss, scale, updated)

    def _count_tokens(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Valid tokens of the global batch, from this data-parallel rank's."""
        num_valid = sum(micro.num_valid for micro in micro_batches) if self.speaks else 0
        count = torch.tensor(float(num_valid), dtype=torch.float64, device=self.device)
        return max(1, int(all_reduce(count, self.mesh.world)))  # a batch of questions alone has no loss, not NaN

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for its data-parallel rank: of those that see the same rows, one does."""
        return self.mesh.tp.rank == 0 and self.mesh.pp.rank == self.mesh.pp.size - 1

    def _agree(self, local_loss: torch.Tensor, square_sum: torch.Tensor) -> tuple[float, float, float, bool]:
        """Loss, gradient norm, the routers' loss and whether anybody was asked to stop, the same bits on every rank."""
        values = torch.zeros(4, dtype=torch.float64, device=self.device)
        if self.speaks:
            values[0] = local_loss
        values[1] = square_sum
        if self.mesh.tp.rank == 0:
            values[2] = self.pipeline.balance_loss() / self.config.train.global_batch_size
        values[3] = float(self.stop.requested)
        loss, square_sum_, balance, stop = all_reduce(values, self.mesh.world).tolist()
        return loss, math.sqrt(square_sum_) if square_sum_ >= 0 else math.nan, balance, stop > 0
