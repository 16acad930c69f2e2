"""The forward and backward passes of a step: this rank's part of a pipeline's schedule, with calls of the engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ...data.batches import MicroBatch
from ...model.decoder import Decoder
from ...model.experts.mixture import MixtureOfExperts
from ...model.spec import ExpertsSpec
from ...parallel.collectives import all_reduce
from ...parallel.mesh import Mesh
from ...parallel.weight_grads import WeightGradQueue
from ..config.train_config import TrainConfig
from ..context.dealing import local_length
from ..pipeline.actions import Action, Kind
from ..pipeline.executor import Boundary, PipelineExecutor
from ..pipeline.schedules import make_schedule
from ..planning.context_plan import ContextPlan
from .gpu_attention import GpuFacts
from .row_packer import PackedRows, RowPacker
from .rows import DealtRows, Rows, WholeRows
from .stages import StagePass
from .training_engine import TrainingEngine


class Passes:
    """Runs the stages of one rank.

    Args:
        decoders: the rank's stages.
        engine: the rank's engine.
        config: the run's configuration.
        weight_grads: the decoders' queue, for schedules that defer weight gradients.
        on_phase: called with the name of each phase that begins.
    """

    def __init__(
        self,
        decoders: Sequence[Decoder],
        engine: TrainingEngine,
        config: TrainConfig,
        weight_grads: WeightGradQueue,
        on_phase: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.config = config
        self.mesh: Mesh = engine.mesh
        self.weight_grads = weight_grads
        self.on_phase = on_phase
        self._packer = RowPacker(decoders, engine.device, _rows(decoders[0], config, self.mesh, engine.device))
        self.stages = [
            StagePass(decoder, engine.device, partial(engine.saving, number)) for number, decoder in enumerate(decoders)
        ]
        for stage in self.stages:
            stage.loss_waits = config.parallel.schedule == "gpipe"
            stage.seed = config.train.seed
            stage.record_routing = config.train.router_bias_update_rate > 0
        self._executors: dict[tuple[str, int], PipelineExecutor] = {}

    @property
    def is_loss_rank(self) -> bool:
        """Whether this rank's loss counts: it does on one of the ranks that compute the same positions."""
        return self.mesh.tp.rank == 0 and self.mesh.pp.rank == self.mesh.pp.size - 1

    @property
    def is_row_rank(self) -> bool:
        """Whether this rank counts the targets of its whole rows: one of the ranks that have the same rows."""
        return self.is_loss_rank and self.mesh.cp.rank == 0

    def pack(self, micro_batches: Sequence[MicroBatch]) -> list[PackedRows]:
        """Returns micro-batches of this data-parallel rank as its stages need them; a thread may call it."""
        return self._packer.pack(micro_batches)

    def train(self, micro_batches: Sequence[PackedRows], loss_factor: float) -> torch.Tensor:
        """Runs forward and backward of this data-parallel rank's micro-batches.

        Args:
            micro_batches: those of one step, in the order of the schedule.
            loss_factor: the factor of each micro-batch's summed loss.

        Returns:
            The sum of their losses, fp64, on ranks of the last stage; 0 on other ranks.
        """
        model, train = self.stages[0].decoder.config, self.config.train
        per_row = self.engine.loss_scale.value / train.global_batch_size
        weights = (model.router_aux_loss_coef * per_row, train.router_z_loss_coef / train.seq_len * per_row)
        return self._run(self.config.parallel.schedule, micro_batches, loss_factor, weights)

    def balance_loss(self) -> torch.Tensor | float:
        """Returns the load-balancing loss of the newest step, summed over this rank's sequences and layers."""
        return sum(balance.total() for stage in self.stages for balance in stage.balances)

    def z_loss(self) -> torch.Tensor | float:
        """Returns the z-loss of the newest step, summed over this rank's tokens and layers."""
        return sum(balance.z_total() for stage in self.stages for balance in stage.balances)

    def level_experts(self) -> None:
        """Updates the biases of routers by the tokens of the newest step, counted over all ranks; every rank calls it.

        Ranks that compute the same positions choose the same experts: one of them counts.
        """
        rate, layers = self.config.train.router_bias_update_rate, self.stages[0].decoder.spec.layers
        blocks = [layer.feed_forward for layer in layers]
        most = max(block.num_experts for block in blocks if isinstance(block, ExpertsSpec))
        counts_LE = torch.zeros(len(layers), most, dtype=torch.float64, device=self.engine.device)
        for balance in (each for stage in self.stages for each in stage.balances if self.mesh.tp.rank == 0):
            balance.add_counts(counts_LE)
        all_reduce(counts_LE, self.mesh.world)
        for stage in self.stages:
            for module in stage.decoder.modules():
                if isinstance(module, MixtureOfExperts):
                    module.gate.level(counts_LE[module.layer], rate)

    def routing(self) -> torch.Tensor | float:
        """Returns a checksum of the experts of the newest step's tokens; a sum, as `balance_loss`.

        Only stages with `record_routing` are in it.
        """
        return sum(balance.routing() for stage in self.stages for balance in stage.balances)

    def evaluate(self, micro_batches: Sequence[PackedRows]) -> torch.Tensor:
        """Returns the sum of the losses as `train` does, but runs no backward."""
        return self._run("forward-only", micro_batches, 1.0, (0.0, 0.0))

    def _run(
        self, name: str, micro_batches: Sequence[PackedRows], loss_factor: float, router_weights: tuple[float, float]
    ) -> torch.Tensor:
        for stage in self.stages:
            stage.micro_batches, stage.loss_factor, stage.balances = micro_batches, loss_factor, []
            stage.balance_weight, stage.z_weight = router_weights
        key = (name, len(micro_batches))
        if key not in self._executors:
            self._executors[key] = self._executor(*key)
        return self._executors[key].run()

    def _executor(self, name: str, num_micro_batches: int) -> PipelineExecutor:
        options, pp = self.config, self.mesh.pp
        schedule = make_schedule(name, pp.size, options.parallel.num_virtual_stages, num_micro_batches)
        split = self.mesh.tp.size if options.parallel.sequence_parallel else 1
        length = local_length(options.train.seq_len, self.mesh.cp.size, split)
        hidden_size = self.stages[0].decoder.config.hidden_size
        shape = (options.train.micro_batch_size, length // split, hidden_size)
        return PipelineExecutor(
            schedule,
            {pp.rank + number * pp.size: stage for number, stage in enumerate(self.stages)},
            pp,
            Boundary(shape, self.engine.buffers.dtype, self.engine.device),
            weight_grads=self.weight_grads,
            around=self._around,
            on_phase=self.on_phase,
        )

    @contextmanager
    def _around(self, action: Action, last: bool) -> Iterator[None]:
        stage = action.stage // self.mesh.pp.size
        if action.kind is Kind.BACKWARD:
            self.engine.begin_backward(stage, last=last)
        elif action.kind is Kind.BACKWARD_INPUT:
            self.engine.begin_backward(stage, last=False, complete=False)
        yield
        if action.kind is not Kind.BACKWARD_WEIGHT:
            self.engine.end_pass(stage)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.engine.gradients_arrived(stage, last=last)


def _rows(decoder: Decoder, config: TrainConfig, mesh: Mesh, device: torch.device) -> Rows:
    """Returns what takes a rank's part of micro-batches."""
    if mesh.cp.size == 1:
        return WholeRows(GpuFacts.of(device))
    plan = ContextPlan.of(config, decoder.spec)
    return DealtRows(mesh.cp, plan.mode, plan.windows, plan.multiple)
