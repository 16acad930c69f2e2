"""A checked configuration with its model and layout, from which a plan is computed (no torch, no processes)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.buckets import all_buckets, buckets
from ...core.cuda import count_gpus
from ...core.dtypes import by_name
from ...core.integers import ceil_div
from ...core.layout import Layout, Stage, stages
from ...core.local_params import LocalParam, local_params, params_of_ranks
from ...core.progress import format_bytes
from ...core.tensors import Table
from ...model.config import ModelConfig
from ...model.lora.coded import coded_bytes, resident_table
from ...model.spec import EMBEDDING, DecoderSpec, ExpertsSpec, LayerSpec
from ..config.initial_model import resolve
from ..config.run_decoder import run_decoder
from ..config.sections import OffloadSection
from ..config.tensor_slots import with_run_slots
from ..config.train_config import TrainConfig
from ..context.dealing import local_length
from ..context.modes import Mode
from ..pipeline.schedules import make_schedule
from ..pipeline.simulator import Simulation, simulate
from .activation_memory import (
    PassShape,
    backward_bytes,
    free_bytes,
    loss_bytes,
    returned_bytes,
    stage_bytes,
    staying_bytes,
    wide_logits_bytes,
)
from .context_plan import ContextPlan
from .context_traffic import bytes_by_mode, context_traffic
from .expert_memory import worst_bytes
from .expert_traffic import expert_traffic
from .model_states import exchange_copies, model_state_bytes, state_parts
from .moved_bytes import Moved, moved_bytes
from .placed_bytes import PlacedBytes
from .planned_model import planned_model
from .problems import notes, problems, refuse, size_problems
from .save_copy import save_copy_bytes, saves_beside_training
from .traffic import FamilyWork, StepWork, Traffic, traffic


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that can start.

    Attributes:
        config: the configuration.
        model: the model's shape.
        spec: the model's decoder.
        table: its tensors with their slots, those that are frozen too.
        stages: for each pipeline rank, the layers that it holds.
        ranks: for each pipeline rank, the parameters of the ranks at its first position.
        num_micro_batches: the number of micro-batches of a rank in a step.
        simulation: the simulated pipeline.
        notes: sentences on settings that waste computation, and on inputs that were not checked.
        on_gpu: whether ranks would compute on GPUs if they started here.
    """

    config: TrainConfig
    layout: Layout
    model: ModelConfig
    spec: DecoderSpec
    table: Table
    stages: tuple[tuple[Stage, ...], ...]
    ranks: tuple[tuple[LocalParam, ...], ...]
    num_micro_batches: int
    simulation: Simulation
    notes: tuple[str, ...]
    on_gpu: bool

    def with_rows_of(self, seq_len: int) -> "PlannedRun":
        """Returns the same run with rows of another length."""
        train = self.config.train.model_copy(update={"seq_len": seq_len})
        return replace(self, config=self.config.model_copy(update={"train": train}))

    def with_offload(self, offload: OffloadSection) -> "PlannedRun":
        """Returns the same run with other places of its model states."""
        config = self.config.model_copy(update={"offload": offload})
        return replace(self, config=config, layout=config.layout(self.layout.world_size, self.on_gpu))

    @property
    def shape(self) -> PassShape:
        """The sizes of a forward pass."""
        config, layout, spec = self.config, self.layout, self.spec
        length = local_length(config.train.seq_len, layout.cp, self._context.multiple)
        return PassShape(
            spec=spec,
            tokens=config.train.micro_batch_size * length,
            itemsize=by_name(config.precision.params).itemsize,
            tp=layout.tp,
            vocab_rows=ceil_div(self.model.vocab_size, layout.tp),
            sequence_parallel=config.parallel.sequence_parallel and layout.tp > 1,
            recompute=config.recompute.mode,
            mlp_tokens=self._mlp_tokens,
            cp=layout.cp,
            cp_mode=self._context.mode,
            experts=layout.families.get("experts"),
        )

    @property
    def _context(self) -> ContextPlan:
        return ContextPlan.of(self.config, self.spec)

    @property
    def _mlp_tokens(self) -> int:
        """The tokens that a dense MLP computes at once, from all ranks over which a sequence is split; 0 = all."""
        config, layout = self.config, self.layout
        positions = config.recompute.mlp_block * (layout.tp if config.parallel.sequence_parallel else 1)
        return config.train.micro_batch_size * min(positions, ceil_div(config.train.seq_len, layout.cp))

    def memory(self) -> tuple[PlacedBytes, ...]:
        """Returns the bytes of each pipeline rank, by place and part. Ranks along other axes need no more."""
        config, layout = self.config, self.layout
        return tuple(
            model_state_bytes(config, layout, params, self.num_micro_batches)
            | self._pass_bytes(pp)
            | _save_bytes(config, self.table, layout, pp, params)
            | self._codes(pp)
            for pp, params in enumerate(self.ranks)
        )

    def _codes(self, pp: int) -> PlacedBytes:
        """Returns the bytes of frozen weights in codes."""
        params = local_params(self.spec.table, self.layout, pp * self.layout.stage_size) if self.spec.base_bits else ()
        size = coded_bytes(self.spec, params, self.layout.tp)
        return PlacedBytes({"frozen codes": size} if size else {})

    def _pass_bytes(self, pp: int) -> PlacedBytes:
        """Returns the bytes of the activations of all micro-batches in flight, and the peaks of loss and backward."""
        shape, held, in_flight = self.shape, self.stages[pp], self.simulation.peak_in_flight[pp]
        loss = loss_bytes(shape) if any(stage.last for stage in held) else 0
        backward = max(backward_bytes(shape, stage) for stage in held)
        passing = {"head and loss": loss, "backward": max(0, backward - loss)}
        if self.config.offload.activations == "none":
            kept = max(stage_bytes(shape, stage) for stage in held) * in_flight
            return PlacedBytes({"activations": kept} | passing)
        stay = max(staying_bytes(shape, stage, self._loss_waits) for stage in held) * in_flight
        returned = max(returned_bytes(shape, stage, self.simulation.peak_deferred[pp]) for stage in held)
        moved = max(self._moving(stage) for stage in held) * in_flight
        return PlacedBytes({"activations": stay + returned} | passing, {"offloaded activations": moved})

    @property
    def _loss_waits(self) -> bool:
        """Whether other micro-batches are computed between a loss and its backward."""
        return self.config.parallel.schedule == "gpipe"

    def _moving(self, stage: Stage) -> int:
        """Returns the bytes of one stage's activations that are offloaded."""
        return stage_bytes(self.shape, stage) - staying_bytes(self.shape, stage, self._loss_waits)

    def at_worst(self) -> list[str]:
        """Returns a sentence on the memory of a rank whose experts all tokens choose, if experts are on several."""
        flights = self.simulation.peak_in_flight
        more = max(worst_bytes(self.shape, stage, flights[pp]) for pp, held in enumerate(self.stages) for stage in held)
        if not more:
            return []
        rounds = "" if self.config.recompute.mode != "none" else "; with [recompute] that is bounded by rounds"
        return [f"A rank whose experts all tokens choose has {format_bytes(more)} more of activations{rounds}."]

    def cpu_memory(self, memory: Sequence[PlacedBytes]) -> tuple[int, ...]:
        """Returns the bytes of all parts, `memory`, on a CPU, and of what takes memory only there, by pipeline rank."""
        return tuple(
            placed.on_cpu + self._only_on_cpus(params, pp)
            for pp, (placed, params) in enumerate(zip(memory, self.ranks, strict=True))
        )

    def _only_on_cpus(self, params: Sequence[LocalParam], pp: int) -> int:
        """Returns the bytes of copies of exchanges, or of products' blocks: these have ended before an exchange."""
        held = self.stages[pp]
        keeps_freed = self.config.offload.optimizer == "none"  # see train/launch/worker.py
        blocks = free_bytes(self.shape, held) if keeps_freed else wide_logits_bytes(self.shape, held)
        return max(exchange_copies(self.config, self.layout, params), blocks)

    @property
    def fullest(self) -> tuple[LocalParam, ...]:
        """The parameters of the pipeline rank that has most."""
        return max(self.ranks, key=lambda params: sum(param.size for param in params))

    @property
    def fullest_stages(self) -> tuple[Stage, ...]:
        """The stages of that pipeline rank."""
        return self.stages[self.ranks.index(self.fullest)]

    def work(self) -> StepWork:
        """Returns the sizes that determine the traffic of the pipeline rank with the most parameters."""
        shape, params = self.shape, self.fullest
        tied = any(spec.alias for spec in shape.spec.table)
        looked_up = 0 if tied else sum(param.size for param in params if param.name == EMBEDDING)
        trained, frozen = Counter[str](), Counter[str]()
        for bucket in all_buckets(params, self.layout):
            (trained if bucket.trainable else frozen)[bucket.family.name] += bucket.size
        again = trained + frozen - Counter(dense=looked_up)
        return StepWork(
            families={name: FamilyWork(trained[name], again[name], frozen[name]) for name in trained | frozen},
            itemsize=shape.itemsize,
            hidden_bytes=shape.tokens * shape.spec.hidden_size * shape.itemsize,
            num_layers=len(self._fullest_layers),
            num_micro_batches=self.num_micro_batches,
            sequence_parallel=shape.sequence_parallel,
            recompute_full=self.config.recompute.mode == "full",
            num_exchanged=sum(block.shared is None for block in self.exchanged),
        )

    @property
    def exchanged(self) -> tuple[ExpertsSpec, ...]:
        """The blocks of experts on different ranks, of the pipeline rank with the most parameters."""
        blocks = (layer.feed_forward for layer in self._fullest_layers) if self.shape.experts else ()
        return tuple(block for block in blocks if isinstance(block, ExpertsSpec))

    @property
    def _fullest_layers(self) -> list[LayerSpec]:
        """The layers of the pipeline rank with the most parameters."""
        return [self.spec.layers[number] for stage in self.fullest_stages for number in stage.layers]

    def traffic(self) -> tuple[Traffic, ...]:
        """Returns the communication of the pipeline rank with the most parameters."""
        work, passes = self.work(), self.num_micro_batches
        of_context = context_traffic(self.shape, work.num_layers, passes, self._fetched)
        return (*traffic(self.layout, work), *of_context, *expert_traffic(self.shape, self.exchanged, passes))

    def bytes_by_mode(self) -> dict[Mode, int]:
        """Returns the bytes of `context_traffic` in each mode of context parallelism that is possible."""
        return bytes_by_mode(self.shape, len(self._fullest_layers), self.num_micro_batches, self._fetched)

    @property
    def _fetched(self) -> float:
        """The share of other ranks' keys that the pipeline rank with the most parameters fetches, if it gathers."""
        return self._context.fetched([layer.window for layer in self._fullest_layers])

    def moved(self) -> tuple[Moved, ...]:
        """Returns what offload moves in a step of the pipeline rank with the most parameters."""
        families = self.work().families.values()
        parts = state_parts(self.config, self.layout, all_buckets(self.fullest, self.layout))
        again = sum(each.num_gathered_twice for each in families) / max(sum(each.num_gathered for each in families), 1)
        plans = buckets(self.fullest, self.layout)
        moved = moved_bytes(self.layout, plans, parts, self.num_micro_batches, again)
        return moved if self.config.offload.activations == "none" else (*moved, self._moved_activations())

    def _moved_activations(self) -> Moved:
        held = self.fullest_stages
        size = sum(map(self._moving, held))
        return Moved("activations", down=size * self.num_micro_batches, up=size * self.num_micro_batches)


def prepare_run(config: TrainConfig, num_ranks: int | None, resume: str = "auto", here: bool = False) -> PlannedRun:
    """Checks a configuration; for arguments and errors see `make_plan`."""
    given = resolve(config, resume)
    refuse(size_problems(config, given.keys, num_ranks))
    model, absent = planned_model(config, given, here)
    spec = run_decoder(config, model)
    refuse(problems(config, spec.table, num_ranks))
    on_gpu = count_gpus() > 0
    layout = config.layout(num_ranks, on_gpu)
    table = with_run_slots(resident_table(spec, layout.tp), config.precision.params, config.optimizer)
    num_micro_batches = ceil_div(config.train.global_batch_size, layout.dp * config.train.micro_batch_size)
    schedule = make_schedule(config.parallel.schedule, layout.pp, layout.virtual_stages, num_micro_batches)
    return PlannedRun(
        config=config,
        layout=layout,
        model=model,
        spec=spec,
        table=table,
        stages=stages(spec.table, layout),
        ranks=tuple(params_of_ranks(table, layout, range(0, layout.world_size, layout.stage_size))),
        num_micro_batches=num_micro_batches,
        simulation=simulate(schedule),
        notes=(*notes(config, layout), *absent),
        on_gpu=on_gpu,
    )


def _save_bytes(
    config: TrainConfig, table: Table, layout: Layout, pp: int, params: Sequence[LocalParam]
) -> PlacedBytes:
    """Returns the bytes of what saves in the background need: a copy, and for states on disk a second area there."""
    if not saves_beside_training(config):
        return PlacedBytes()
    states = state_parts(config, layout, buckets(params, layout))["optimizer"]
    on_disk = states.tier == "disk"
    size = save_copy_bytes(config, table, layout, pp)
    return PlacedBytes(host={"copy for saves": size}, disk={"optimizer, for saves": states.nbytes} if on_disk else {})
