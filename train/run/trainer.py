"""The training loop: rows in, one optimizer step after another, metrics and checkpoints out."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ...core.local_params import LocalParam
from ...data.batches import global_batch
from ...data.dataset import PackedDataset
from ...model.init import fill_initial
from ...model.lora.coded import resident_table
from ...model.lora.table import is_factor
from ...model.shape import ModelKeys
from ...parallel.collectives import all_reduce
from ...parallel.mesh import Mesh
from ...parallel.torch_dtypes import torch_dtype
from ...parallel.weight_grads import WeightGradQueue
from ..config.initial_model import resolve
from ..config.run_decoder import run_decoder
from ..config.run_inputs import Inputs
from ..config.train_config import TrainConfig
from ..engine.compiling import compile_layers
from ..engine.evaluate import evaluate
from ..engine.lr_schedule import learning_rate
from ..engine.optimizer_step import OptimizerStep
from ..engine.passes import Passes
from ..engine.row_packer import PackedRows
from ..engine.stages import build_stages, gathered_units, update_waits
from ..engine.training_engine import TrainingEngine, TrainingOptions
from ..health.heartbeat import Heartbeat
from ..health.stop import StopRequest
from ..records.metrics import MetricsFile
from ..records.step_log import StepLog
from ..saving.checkpointer import Checkpointer, OpenRun, SaveOptions
from ..state.progress import StepResult, TrainState
from ..state.stored_state import RunResume
from ..zero.states.pinned_copies import PinnedCopies
from .adapter_base import AdapterBase
from .coded_base import make_codes
from .inputs import open_inputs
from .read_ahead import ReadAhead
from .run_start import RunStart


class Trainer:
    """Trains one model on this rank's part of a mesh.

    Args:
        config: the run's configuration.
        mesh: this rank's groups; None makes them over torch's default process group, or for one rank without it.
        device: the device that computes; None for the CPU.
        resume: "auto" continues the run folder's newest committed step, "never" starts at 0 and refuses a run folder
            that has steps, anything else is a checkpoint to continue from.
        fork: whether steps of the run folder that are newer than the given checkpoint are moved to a folder of their
            own; otherwise they are an error.
        stop: a request to stop, which is read at the end of every step.
        on_step: called after every step with its number, counted from 1, and its result.
        heartbeat: records the phase of this rank, at the begin of each.

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
        given = resolve(config, resume)
        # torch.device("cuda") is not the "cuda:0" that tensors there name as their device.
        self.device = torch.empty(0, device=device or "cpu").device
        self.mesh = mesh or _build_mesh(config, given.keys, self.device)
        self.resume = resume
        self.fork = fork
        self.stop = stop or StopRequest()
        self.on_step = on_step
        self.heartbeat = heartbeat or Heartbeat()
        self.dtype = torch_dtype(config.precision.params)
        self.inputs: Inputs = open_inputs(config, given, self.mesh, self.device)
        self.spec = run_decoder(config, self.inputs.model)
        self.weight_grads = WeightGradQueue()
        self.engine = self._engine()
        self.pipeline = Passes(self.stages, self.engine, config, self.weight_grads, self.heartbeat.beat)
        self.checkpointer = Checkpointer(self.engine, self.mesh)
        self.optimizer_step = OptimizerStep(
            self.engine,
            config.train,
            before_update=self.checkpointer.flush_pending,
            on_phase=self.heartbeat.beat,
        )
        self.state = TrainState()
        rows = config.train.global_batch_size
        self.batches = ReadAhead(lambda first: self._batch(self.inputs.train, first, rows), stride=rows)

    def _engine(self) -> TrainingEngine:
        parallel = self.config.parallel
        self.stages = build_stages(
            self.inputs.model,
            self.spec,
            self.mesh,
            self.dtype,
            sequence_parallel=parallel.sequence_parallel,
            weight_grads=self.weight_grads,
            recompute=self.config.recompute.mode,
            mlp_block=self.config.recompute.mlp_block,
        )
        options = TrainingOptions(
            self.config.optimizer,
            self.config.precision,
            parallel.sequence_parallel,
            self.config.zero.overlap,
            self.config.offload,
            self.config.run_folder,
            self.config.train.seed,
        )
        engine = TrainingEngine(
            self.stages,
            resident_table(self.spec, self.mesh.tp.size),
            self.mesh,
            options,
            device=self.device,
            fill=partial(self.fill, PinnedCopies()),
        )
        if self.spec.base_bits and not self.config.model.init:
            make_codes(self.stages, self.config.train.seed, self.dtype, self.device)
        if self.config.zero.stage == 3:
            engine.gather_around(gathered_units(self.stages, engine.buffers), prefetch=self.config.zero.overlap)
        if self.config.offload.optimizer != "none":
            engine.update_behind([] if engine.gathers else update_waits(self.stages, engine.buffers))
        elif self.device.type != "cpu" and not engine.gathers:  # a CPU would compute and copy at once
            engine.gather_behind(update_waits(self.stages, engine.buffers))
        if self.config.train.compile:
            compile_layers(self.stages, self.config, self.device)
        return engine

    def fill(self, copies: PinnedCopies, local: LocalParam, parameter: torch.Tensor) -> None:
        """Writes a parameter's initial values, made on the host; draws none if `fit` will load a checkpoint."""
        if self.config.model.init and not is_factor(local.pieces[0].tensor):
            return
        values = parameter if self.device.type == "cpu" else torch.empty(parameter.shape, dtype=parameter.dtype)
        fill_initial(local, values, self.config.train.seed, self.inputs.model.initializer_range)
        if values is not parameter:
            copies.copy(parameter.view(-1), values.view(-1))

    def fit(self) -> TrainState:
        """Trains to `train.steps` or to a request to stop, and saves at the end; returns the state at the end."""
        self.engine.home.require()
        self.heartbeat.beat("loading")
        base = AdapterBase.of(self.config, self.inputs.model, self.spec, self.checkpointer.ranks)
        with self.checkpointer.open(self.save_options(base)) as run:
            start = RunStart(self.checkpointer, run, self.config, self.inputs, base, self.stages)
            self.state = start.begin(self.resume, self.fork)
            folder, step = self.config.run_folder, self.state.step
            events = self.config.metrics.tensorboard
            metrics = MetricsFile(folder, step, run.attempt, events) if self.mesh.world.rank == 0 else None
            try:
                with self.batches.running(self.config.train.steps - self.state.step):
                    self._loop(run, metrics)
            finally:
                if metrics:
                    metrics.close()
        return self.state

    def save_options(self, base: AdapterBase | None = None) -> SaveOptions:
        """Returns the settings with which steps are saved; `base` is that of the run's adapter, if it trains one."""
        options = self.config.checkpoint
        return SaveOptions(
            self.config.run_folder,
            options.keep,
            options.keep_every,
            options.async_save,
            self.config.parallel.timeout_seconds,
            self.inputs.side_files,
            base.record if base else None,
        )

    def _loop(self, run: OpenRun, metrics: MetricsFile | None) -> None:
        options = self.config.train
        log = StepLog(self.config, self.spec, self.mesh.world, self.device, self.dtype, metrics, self.state.step)
        with log:
            while self.state.step < options.steps:
                result = self.step()
                last = self.state.step == options.steps or result.stop
                log.record(self.state, result, last)
                self.on_step(self.state.step, result)
                run.saver.report_news()
                every = self.config.checkpoint.every
                if last or (every and self.state.step % every == 0):
                    self.heartbeat.beat("save")
                    run.saver.save(self.state.step, self.resume_state().to_json(), wait=last)
                if result.stop:
                    return
                if last or (options.eval_every and self.state.step % options.eval_every == 0):
                    self.heartbeat.beat("evaluate")
                    log.record_evaluation(self.state.step, self._evaluate())

    def resume_state(self) -> RunResume:
        """Returns the present state of the run that a checkpoint stores beside tensors."""
        engine = self.engine
        return RunResume(
            self.state,
            engine.optimizer.step_count,
            engine.loss_scale.state,
            self.config.train.seed,
            self.inputs.fingerprint,
        )

    def _evaluate(self) -> float:
        """Returns the loss over the first `train.eval_rows` rows of the held-out split."""
        rows = min(self.config.train.eval_rows, self.inputs.held_out.num_rows)
        return evaluate(self.pipeline, self._batch(self.inputs.held_out, 0, rows), self.mesh)

    def _batch(self, dataset: PackedDataset, first: int, num_rows: int) -> list[PackedRows]:
        at, layout = self.mesh.coordinates, self.mesh.layout
        rows = global_batch(dataset, first, num_rows, at.dp, layout.dp, self.config.train.micro_batch_size)
        return self.pipeline.pack(rows)

    def step(self) -> StepResult:
        """Makes one optimizer step on the next global batch.

        If the loss or the gradient overflowed or is not finite, parameters and states stay unchanged.

        Raises:
            TkError: the loss or the gradient norm is not finite, and `train.on_nonfinite` or the number of such steps
                in a row ends the run.
        """
        self.engine.home.require()
        options, step = self.config, self.state.step
        self.heartbeat.beat("data", step + 1)
        lr = learning_rate(self.engine.optimizer.step_count, options.train.steps, options.optimizer)
        micro_batches = self.batches.take(self.state.samples)
        num_tokens = self._count_tokens(micro_batches)
        self.engine.begin_step()
        scale = self.engine.loss_scale.value
        local_loss = self.pipeline.train(micro_batches, scale / num_tokens) / scale
        rows, counts = options.train.global_batch_size, self.mesh.tp.rank == 0
        sums = self.optimizer_step.agree(
            local_loss if self.pipeline.is_loss_rank else 0.0,
            self.pipeline.balance_loss() / rows if counts else 0.0,
            self.pipeline.z_loss() / rows / options.train.seq_len if counts else 0.0,
            float(self.stop.requested),
        )
        balance_loss, z_loss, stop = sums.others
        updated = self.optimizer_step.update(step + 1, sums, local_loss, lr)
        if updated and options.train.router_bias_update_rate:
            self.pipeline.level_experts()
        self.state = self.state.advance(num_tokens, options.train.global_batch_size)
        return StepResult(sums.loss, sums.grad_norm, lr, num_tokens, stop > 0, balance_loss, z_loss, scale, updated)

    def _count_tokens(self, micro_batches: Sequence[PackedRows]) -> int:
        """Returns the number of tokens of the global batch that the loss counts, from this data-parallel rank's."""
        num_valid = sum(micro.num_valid for micro in micro_batches) if self.pipeline.is_row_rank else 0
        count = torch.full((), num_valid, dtype=torch.float64, device=self.device)
        return max(1, int(all_reduce(count, self.mesh.world)))  # a batch of questions alone has no loss, not NaN


def _build_mesh(config: TrainConfig, model: ModelKeys, device: torch.device) -> Mesh:
    """Makes the groups of this rank; every rank of the process group calls it."""
    return Mesh.build(
        config.layout(dist.get_world_size() if dist.is_initialized() else 1, on_gpu=device.type != "cpu"),
        model.num_key_value_heads,
        model.tie_word_embeddings,
        timeout_seconds=config.parallel.timeout_seconds,
    )
