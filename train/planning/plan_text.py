"""A plan as text, with tables of memory, of what is sent, and of what offload moves."""

from collections.abc import Mapping, Sequence
from typing import Final

from ...core.progress import format_bytes, format_count, format_seconds
from .machines import Machines, per_host
from .moved_bytes import in_all
from .plan import RunPlan

_ANYWHERE: Final = Machines()
_WAYS: Final = ("down", "up", "read", "written")


def describe(plan: RunPlan, machines: Machines = _ANYWHERE) -> str:
    """Returns the plan as text, with times of what offload moves at the rates that are known."""
    layout = plan.layout
    axes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp}
    sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1 or name in ("tp", "dp"))
    apart = f", experts ep {layout.ep} x tp {layout.experts.tp}" if layout.experts != layout.dense else ""
    lines = [
        f"model      {plan.model.architecture}, {plan.num_parameters:,} parameters, vocabulary {plan.model.vocab_size}",
        f"layout     {sizes} = {layout.world_size} ranks, ZeRO-{layout.zero}{apart}",
        f"step       {plan.tokens_per_step:,} tokens, {plan.num_micro_batches} micro-batches per rank, "
        f"{plan.flops_per_step / 1e12:,.2f} TFLOP",
        f"training   {plan.steps} steps, {plan.steps * plan.tokens_per_step:,} tokens",
    ]
    if layout.pp > 1:
        lines.append(f"pipeline   {plan.schedule}, ranks wait {100 * plan.bubble:.1f} % of the time")
    if plan.cp_bytes:
        sent = ", ".join(f"{mode} {format_bytes(size)}" for mode, size in plan.cp_bytes.items())
        lines.append(f"attention  over cp by {plan.cp_mode}; bytes that a rank sends per step: {sent}")
    lines += ["", *_memory_tables(plan, machines), ""]
    lines += [*_traffic_table(plan), ""] if plan.traffic else []
    lines += [*_moved_table(plan, machines), ""] if plan.moved else []
    lines += [f"note       {note}" for note in plan.notes]
    return "\n".join([*lines, f"run folder {plan.run_folder}"])


def _row(name: str, cells: Sequence[str]) -> str:
    return "".join([f"{name:<24}", *(f"{cell:>12}" for cell in cells)]).rstrip()


def _memory_tables(plan: RunPlan, machines: Machines) -> list[str]:
    columns = [f"pp rank {rank}" for rank in range(len(plan.memory))] if len(plan.memory) > 1 else [""]
    lines = _places_table("memory per rank", columns, [placed.device for placed in plan.memory])
    host, disk = ([getattr(placed, name) for placed in plan.memory] for name in ("host", "disk"))
    lines += _places_table("memory of the host", [""] * len(columns), host) if any(host) else []
    lines += _places_table("on disk", [""] * len(columns), disk) if any(disk) else []
    lines.append(_row("on a CPU, with malloc", [format_bytes(size) for size in plan.cpu_memory]))
    return [*lines, *_host_lines(plan, machines)]


def _places_table(title: str, columns: Sequence[str], ranks: Sequence[Mapping[str, int]]) -> list[str]:
    names = list(dict.fromkeys(name for parts in ranks for name in parts))
    rows = [_row(f"  {name}", [format_bytes(parts.get(name, 0)) for parts in ranks]) for name in names]
    return [_row(title, columns), *rows, _row("  total", [format_bytes(sum(parts.values())) for parts in ranks])]


def _host_lines(plan: RunPlan, machines: Machines) -> list[str]:
    """Returns what the ranks of a host take of its memory and its disk together."""
    world_size = plan.layout.world_size
    count = machines.ranks_of_a_host(world_size)
    stage_size = plan.layout.stage_size
    sizes = {
        "memory beside GPUs": per_host([placed.on_host for placed in plan.memory], stage_size, count),
        "disk": per_host([placed.on_disk for placed in plan.memory], stage_size, count),
    }
    if count == 1 or not any(sizes.values()):
        return []
    text = ", ".join(f"{format_bytes(size)} of {name}" for name, size in sizes.items() if size)
    return [f"{f'a host of {count} ranks':<24}{text}"]


def _traffic_table(plan: RunPlan) -> list[str]:
    lines = [f"{'sent per rank and step':<24}{'calls':>12}{'each':>12}{'in all':>12}"]
    for each in plan.traffic:
        sizes = f"{format_bytes(each.message_bytes):>12}{format_bytes(each.wire_bytes):>12}"
        lines.append(f"  {f'{each.axis} {each.collective}':<22}{each.calls:>12}{sizes}  {each.what}")
    return lines


def _moved_table(plan: RunPlan, machines: Machines) -> list[str]:
    total = in_all(plan.moved)
    lines = [_row("moved per rank and step", ["GPU to host", "host to GPU", "read", "written"])]
    for each in (*plan.moved, total):
        lines.append(_row(f"  {each.part}", [format_bytes(getattr(each, way)) for way in _WAYS]))
    neighbours = machines.ranks_of_a_host(plan.layout.world_size)
    if times := machines.seconds(total, neighbours):
        cells = [format_seconds(times[way]) if way in times else "" for way in _WAYS]
        shared = f", {format_count(neighbours, 'rank')}" if neighbours > 1 else ""
        lines.append(_row(f"  time{shared}", cells))
    return lines
