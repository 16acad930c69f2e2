"""The plan of a run from its configuration alone: memory by part, bubble, traffic (no torch, no processes)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ...core.buckets import buckets
from ...core.cuda import count_gpus
from ...core.dtypes import FP32, by_name
from ...core.errors import ConfigError
from ...core.integers import ceil_div
from ...core.layout import Layout, Stage, stages
from ...core.local_params import LocalParam, local_params
from ...core.machine_memory import machine_memory
from ...core.progress import format_bytes, format_count
from ...core.tensors import Table
from ...model.config import ModelConfig
from ...model.registry import count_parameters, decoder_spec
from ...model.spec import EMBEDDING, DecoderSpec
from ..config.freezing import without_frozen
from ..config.initial_model import resolve
from ..config.train_config import TrainConfig
from ..pipeline.schedules import make_schedule
from ..pipeline.simulator import simulate
from .activation_memory import PassShape, backward_bytes, free_bytes, logits_bytes, stage_bytes
from .flops import flops_per_token
from .planned_model import planned_model
from .problems import notes, problems, refuse, size_problems
from .save_copy import save_copy_bytes
from .traffic import StepWork, Traffic, traffic

IN_FLIGHT = 3  # buckets of gradients in memory: one is filled while two are exchanged


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The shape and the cost of a run.

    Attributes:
        memory: for each pipeline rank, the bytes by part. Ranks along other axes need no more.
        cpu_memory: for each pipeline rank, the bytes of all parts, and those that malloc holds free on a CPU.
        in_flight: for each pipeline rank, the largest number of (micro-batch, stage) pairs whose activations it keeps.
        bubble: the share of the time of all ranks that they wait in the pipeline.
        traffic: the communication of the pipeline rank with the most parameters.
        notes: sentences on settings that waste computation, on inputs that were not checked, and on memory.
    """

    model: ModelConfig
    num_parameters: int
    layout: Layout
    schedule: str
    num_micro_batches: int
    memory: tuple[dict[str, int], ...]
    cpu_memory: tuple[int, ...]
    in_flight: tuple[int, ...]
    bubble: float
    traffic: tuple[Traffic, ...]
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
            "memory": [
                part | {"total": sum(part.values()), "total_on_cpu": on_cpu}
                for part, on_cpu in zip(self.memory, self.cpu_memory, strict=True)
            ],
            "schedule": {"name": self.schedule, "bubble": self.bubble, "in_flight": list(self.in_flight)}
            | {"num_micro_batches": self.num_micro_batches},
            "traffic": [asdict(each) | {"wire_bytes": each.wire_bytes} for each in self.traffic],
            "tokens_per_step": self.tokens_per_step,
            "flops_per_step": self.flops_per_step,
            "steps": self.steps,
            "notes": list(self.notes),
            "run_folder": str(self.run_folder),
        }


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
    given = resolve(config, resume)
    refuse(size_problems(config, given.keys, num_ranks))
    model, absent = planned_model(config, given, here)
    spec = decoder_spec(model)
    table = without_frozen(spec.table, config.train.freeze)
    refuse(problems(config, table, num_ranks))
    layout = config.layout(num_ranks)
    rows = layout.dp * config.train.micro_batch_size
    num_micro_batches = ceil_div(config.train.global_batch_size, rows)
    schedule = make_schedule(config.parallel.schedule, layout.pp, layout.virtual_stages, num_micro_batches)
    simulation = simulate(schedule)
    ranks = [local_params(table, layout, pp, 0) for pp in range(layout.pp)]
    shape = _pass_shape(config, model, spec)
    memory = [
        model_state_bytes(config, layout, params)
        | _pass_bytes(shape, stages(table, layout, pp), simulation.peak_in_flight[pp])
        | _save_bytes(config, table, layout, pp)
        for pp, params in enumerate(ranks)
    ]
    cpu_memory = tuple(
        sum(parts.values()) + free_bytes(shape, stages(table, layout, pp)) for pp, parts in enumerate(memory)
    )
    fullest = max(ranks, key=lambda params: sum(param.size for param in params))
    tokens = config.train.global_batch_size * config.train.seq_len
    return RunPlan(
        model=model,
        num_parameters=count_parameters(model),
        layout=layout,
        schedule=config.parallel.schedule,
        num_micro_batches=num_micro_batches,
        memory=tuple(memory),
        cpu_memory=cpu_memory,
        in_flight=simulation.peak_in_flight,
        bubble=simulation.bubble,
        traffic=tuple(traffic(layout, _work(config, layout, shape, fullest, num_micro_batches))),
        tokens_per_step=tokens,
        flops_per_step=flops_per_token(model, config.train.seq_len) * tokens,
        steps=config.train.steps,
        notes=(*notes(config, layout), *absent, *_check_memory(cpu_memory, layout, here)),
        run_folder=config.run_folder,
    )


def _check_memory(ranks: Sequence[int], layout: Layout, here: bool) -> list[str]:
    """Returns a sentence if this machine has not the memory of all ranks; raises ConfigError if it must have it.

    Ranks on GPUs have memory of their own, which is not compared.
    """
    needed, available = sum(ranks) * layout.tp * layout.dp, machine_memory()
    if needed <= available or count_gpus():
        return []
    text = (
        f"{format_count(layout.world_size, 'rank')} of at most {format_bytes(max(ranks))} need {format_bytes(needed)} "
        f"of memory, and this machine has {format_bytes(available)}."
    )
    if here:
        raise ConfigError(
            f"{text} Use a smaller model or micro-batch, shorter rows, a higher [zero] stage, [recompute], or more "
            "machines; `tk plan` shows the memory by part."
        )
    return [text]


def model_state_bytes(config: TrainConfig, layout: Layout, params: Sequence[LocalParam]) -> dict[str, int]:
    """Returns the bytes of model states, which live as long as the run, and of buckets and gathered parameters.

    Padding is included. Per low-precision parameter, with g = 4 bytes of an fp32 gradient, 12 bytes of fp32 master and
    two moments, and N ranks per ZeRO group:

        stage 0: 2 + g + 12     1: 2 + g + 12 / N     2: 2 + (g + 12) / N     3: (g + 12) / N, only fp32 shards

    fp32 parameters need no masters. With bf16 moments 12 is 8.
    """
    itemsize, zero, group = by_name(config.precision.params).itemsize, layout.zero, layout.group_size
    moments = 2 * by_name(config.optimizer.states).itemsize
    sizes = sorted((bucket.size for bucket in buckets(params, layout)), reverse=True)
    total, masters = sum(sizes), FP32.itemsize if itemsize < FP32.itemsize and zero < 3 else 0
    frozen = sum(param.size for param in params if not param.trainable)  # on every rank, at any stage
    result = {
        "parameters": (total * FP32.itemsize // group if zero == 3 else total * itemsize) + frozen * itemsize,
        "gradients": total * FP32.itemsize // (group if zero >= 2 else 1),
        "optimizer": total * (moments + masters) // group,
    }
    exchanged = sizes[:IN_FLIGHT] if config.zero.overlap else sizes
    if zero >= 2:
        result["buckets"] = sum(exchanged) * FP32.itemsize
    if zero == 3:
        result["gathered parameters"] = _gathered(params, config.zero.overlap) * itemsize
    return result


def _gathered(params: Sequence[LocalParam], prefetch: bool) -> int:
    """Returns the most elements that are gathered at once: a layer, and the next one if it is prefetched."""
    sizes = [
        sum(param.size for param in unit if param.trainable) for _, unit in groupby(params, lambda param: param.unit)
    ]
    return max(map(sum, pairwise(sizes)), default=sizes[0]) if prefetch else max(sizes)


def _pass_shape(config: TrainConfig, model: ModelConfig, spec: DecoderSpec) -> PassShape:
    return PassShape(
        spec=spec,
        tokens=config.train.micro_batch_size * config.train.seq_len,
        itemsize=by_name(config.precision.params).itemsize,
        tp=config.parallel.tp,
        vocab_rows=ceil_div(model.vocab_size, config.parallel.tp),
        sequence_parallel=config.parallel.sequence_parallel and config.parallel.tp > 1,
        recompute=config.recompute.mode,
    )


def _pass_bytes(shape: PassShape, held: Sequence[Stage], in_flight: int) -> dict[str, int]:
    """Returns the bytes of the activations of all micro-batches in flight, and the peaks of head, loss and backward."""
    kept = max(stage_bytes(shape, stage) for stage in held)
    logits = logits_bytes(shape) if any(stage.last for stage in held) else 0
    backward = max(backward_bytes(shape, stage) for stage in held)
    return {"activations": kept * in_flight, "logits and loss": logits, "backward": max(0, backward - logits)}


def _save_bytes(config: TrainConfig, table: Table, layout: Layout, pp: int) -> dict[str, int]:
    size = save_copy_bytes(config, table, layout, pp)
    return {"copy for saves": size} if size else {}


def _work(
    config: TrainConfig, layout: Layout, shape: PassShape, params: Sequence[LocalParam], num_micro_batches: int
) -> StepWork:
    num_params = sum(bucket.size for bucket in buckets(params, layout))
    tied = any(spec.alias for spec in shape.spec.table)
    looked_up = 0 if tied else sum(param.size for param in params if param.name == EMBEDDING)
    layers = {param.pieces[0].tensor.layer for param in params}
    return StepWork(
        num_params=num_params,
        num_gathered_twice=num_params - looked_up,
        itemsize=shape.itemsize,
        hidden_bytes=shape.tokens * shape.spec.hidden_size * shape.itemsize,
        num_layers=sum(isinstance(layer, int) for layer in layers),
        num_micro_batches=num_micro_batches,
        sequence_parallel=shape.sequence_parallel,
        recompute_full=config.recompute.mode == "full",
    )


def describe(plan: RunPlan) -> str:
    """Returns the plan as text with two tables."""
    layout = plan.layout
    axes = [("tp", layout.tp), *([("pp", layout.pp)] if layout.pp > 1 else []), ("dp", layout.dp)]
    lines = [
        f"model      {plan.model.architecture}, {plan.num_parameters:,} parameters, vocabulary {plan.model.vocab_size}",
        f"layout     {' x '.join(f'{name} {size}' for name, size in axes)} = {layout.world_size} ranks, "
        f"ZeRO-{layout.zero}",
        f"step       {plan.tokens_per_step:,} tokens, {plan.num_micro_batches} micro-batches per rank, "
        f"{plan.flops_per_step / 1e12:,.2f} TFLOP",
        f"training   {plan.steps} steps, {plan.steps * plan.tokens_per_step:,} tokens",
    ]
    if layout.pp > 1:
        lines.append(f"pipeline   {plan.schedule}, ranks wait {100 * plan.bubble:.1f} % of the time")
    lines += ["", *_memory_table(plan), ""]
    lines += [*_traffic_table(plan), ""] if plan.traffic else []
    lines += [f"note       {note}" for note in plan.notes]
    return "\n".join([*lines, f"run folder {plan.run_folder}"])


def _memory_table(plan: RunPlan) -> list[str]:
    names = list(dict.fromkeys(name for parts in plan.memory for name in parts))
    columns = [f"pp rank {rank}" for rank in range(len(plan.memory))] if len(plan.memory) > 1 else [""]
    rows = [("memory per rank", columns)]
    rows += [(f"  {name}", [format_bytes(parts.get(name, 0)) for parts in plan.memory]) for name in names]
    rows.append(("  total", [format_bytes(sum(parts.values())) for parts in plan.memory]))
    rows.append(("  on a CPU, with malloc", [format_bytes(size) for size in plan.cpu_memory]))
    return ["".join([f"{name:<24}", *(f"{cell:>12}" for cell in cells)]).rstrip() for name, cells in rows]


def _traffic_table(plan: RunPlan) -> list[str]:
    lines = [f"{'sent per rank and step':<24}{'calls':>12}{'each':>12}{'in all':>12}"]
    for each in plan.traffic:
        sizes = f"{format_bytes(each.message_bytes):>12}{format_bytes(each.wire_bytes):>12}"
        lines.append(f"  {f'{each.axis} {each.collective}':<22}{each.calls:>12}{sizes}  {each.what}")
    return lines
