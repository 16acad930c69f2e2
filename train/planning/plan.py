"""The plan of a run from its configuration alone: memory by part, bubble, traffic (no torch, no processes)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.cuda import count_gpus
from ...core.errors import ConfigError
from ...core.garbage import no_garbage_collection
from ...core.layout import Layout
from ...core.machine_memory import machine_memory
from ...core.progress import format_bytes, format_count
from ...model.config import ModelConfig
from ...model.registry import count_parameters
from ..config.sections import OffloadSection
from ..config.train_config import TrainConfig
from ..context.modes import Mode
from .flops import flops_per_token
from .moved_bytes import Moved
from .placed_bytes import PlacedBytes
from .planned_run import PlannedRun, prepare_run
from .relief import relief
from .traffic import Traffic


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The shape and the cost of a run.

    Attributes:
        memory: for each pipeline rank, the bytes by place and part. Ranks along other axes need no more.
        cpu_memory: for each pipeline rank, the bytes of all parts in memory, and those that malloc holds free on a CPU.
        in_flight: for each pipeline rank, the largest number of (micro-batch, stage) pairs whose activations it keeps.
        bubble: the share of the time of all ranks that they wait in the pipeline.
        traffic: the communication of the pipeline rank with the most parameters.
        moved: the bytes that offload moves on that rank.
        cp_mode: how attention gets the keys of other context-parallel ranks.
        cp_bytes: the bytes that a rank of it sends per step in each mode that is possible; none without such ranks.
        notes: sentences on settings that waste computation, on inputs that were not checked, and on memory.
    """

    model: ModelConfig
    num_parameters: int
    layout: Layout
    schedule: str
    num_micro_batches: int
    offload: OffloadSection
    memory: tuple[PlacedBytes, ...]
    cpu_memory: tuple[int, ...]
    in_flight: tuple[int, ...]
    bubble: float
    traffic: tuple[Traffic, ...]
    moved: tuple[Moved, ...]
    cp_mode: Mode
    cp_bytes: Mapping[Mode, int]
    tokens_per_step: int
    flops_per_step: float
    steps: int
    notes: tuple[str, ...]
    run_folder: Path

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data, with bytes and shares as numbers."""
        return {
            "model": {"architecture": self.model.architecture, "parameters": self.num_parameters}
            | {"vocab_size": self.model.vocab_size},
            "layout": self.layout.to_json(),
            "offload": self.offload.model_dump(mode="json"),
            "memory": [
                _with_total(placed.device) | {"total_on_cpu": on_cpu}
                for placed, on_cpu in zip(self.memory, self.cpu_memory, strict=True)
            ],
            "host_memory": [_with_total(placed.host) for placed in self.memory],
            "disk": [_with_total(placed.disk) for placed in self.memory],
            "schedule": {"name": self.schedule, "bubble": self.bubble, "in_flight": list(self.in_flight)}
            | {"num_micro_batches": self.num_micro_batches},
            "traffic": [asdict(each) | {"wire_bytes": each.wire_bytes} for each in self.traffic],
            "moved": [asdict(each) for each in self.moved],
            "context": {"mode": self.cp_mode, "wire_bytes": dict(self.cp_bytes)} if self.cp_bytes else None,
            "tokens_per_step": self.tokens_per_step,
            "flops_per_step": self.flops_per_step,
            "steps": self.steps,
            "notes": list(self.notes),
            "run_folder": str(self.run_folder),
        }


def _with_total(parts: Mapping[str, int]) -> dict[str, int]:
    return {**parts, "total": sum(parts.values())}


@no_garbage_collection()
def make_plan(config: TrainConfig, num_ranks: int | None, resume: str = "auto", *, here: bool = False) -> RunPlan:
    """Plans a run.

    Args:
        config: the configuration.
        num_ranks: the number of ranks of the job; None = as many as the layout needs.
        resume: "auto", "never" or a checkpoint; see Trainer.
        here: whether all ranks are to start on this machine: data that it lacks, and memory, are then an error instead
            of a note.

    Raises:
        ParallelError: the run cannot start; the message lists every reason.
        CheckpointError: the tokenizer or the checkpoint that gives the model's shape cannot be used.
        ConfigError: a pattern of `train.freeze` matches no parameter, [train] seq_len is longer than the model allows,
            data cannot be used, or the run needs more memory than this machine has.
    """
    return plan_of(prepare_run(config, num_ranks, resume, here), here=here)


def plan_of(run: PlannedRun, *, here: bool = False) -> RunPlan:
    """Returns the plan of a prepared run; for `here` and its error see `make_plan`."""
    config, layout = run.config, run.layout
    memory = run.memory()
    cpu_memory = run.cpu_memory(memory)
    tokens = config.train.global_batch_size * config.train.seq_len
    return RunPlan(
        model=run.model,
        num_parameters=count_parameters(run.spec),
        layout=layout,
        schedule=config.parallel.schedule,
        num_micro_batches=run.num_micro_batches,
        offload=config.offload,
        memory=memory,
        cpu_memory=cpu_memory,
        in_flight=run.simulation.peak_in_flight,
        bubble=run.simulation.bubble,
        traffic=run.traffic(),
        moved=run.moved(),
        cp_mode=run.shape.cp_mode,
        cp_bytes=run.bytes_by_mode(),
        tokens_per_step=tokens,
        flops_per_step=flops_per_token(run.spec, config.train.seq_len) * tokens,
        steps=config.train.steps,
        notes=(*run.notes, *run.at_worst(), *_check_memory(run, cpu_memory, here)),
        run_folder=config.run_folder,
    )


def _check_memory(run: PlannedRun, ranks: Sequence[int], here: bool) -> list[str]:
    """Returns a sentence if this machine has not the memory of all ranks; raises ConfigError if it must have it.

    Ranks on GPUs have memory of their own, which is not compared.
    """
    needed, available = sum(ranks) * run.layout.stage_size, machine_memory()
    if needed <= available or count_gpus():
        return []
    verb = "needs" if run.layout.world_size == 1 else "need"
    text = (
        f"{format_count(run.layout.world_size, 'rank')} of at most {format_bytes(max(ranks))} {verb} "
        f"{format_bytes(needed)} of memory, and this machine has {format_bytes(available)}."
    )
    if here:
        raise ConfigError(f"{text} {relief(run, available)}")
    return [text]
