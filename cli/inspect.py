"""`tk inspect`: a summary of a checkpoint."""

from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from ..core.progress import format_bytes
from .common import PATH, print_json
from .reshard import open_checkpoint

_KINDS: Final = MappingProxyType({"tk": "tk checkpoint", "huggingface": "Hugging Face folder", "peft": "PEFT folder"})


@click.command(epilog="Example: tk inspect runs/demo/run")
@click.argument("path", metavar="CKPT", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect(path: Path, as_json: bool) -> None:
    """Show the step, layout, files and tensors of CKPT. Tensor data is not read."""
    from ..checkpoint.read.inspect import describe

    summary = describe(open_checkpoint(path))
    if as_json:
        print_json(summary)
        return
    for line in _head(summary):
        click.echo(line)
    for line in _tree(summary["tensors"]):
        click.echo(line)
    for alias, name in summary["aliases"].items():
        click.echo(f"{alias} = {name}")


def _head(summary: dict[str, Any]) -> list[str]:
    layout = summary["layout"]
    sizes = ", ".join(f"{slot} {format_bytes(size)}" for slot, size in summary["slot_bytes"].items())
    lines = [
        f"{summary['path']} ({_KINDS[summary['kind']]})",
        f"parameters  {summary['parameters']:,}",
        f"slots       {sizes}",
        f"files       {len(summary['files'])}, {format_bytes(sum(summary['files'].values()))}",
        f"identity    {summary['manifest_sha256']}",
    ]
    if summary["kind"] == "tk":
        axes = ("tp", "pp", "dp", *(key for key in ("cp", "ep", "expert_tp") if key in layout))
        saved = f"{', '.join(f'{key} {layout[key]}' for key in axes)}, ZeRO {layout['zero']}"
        lines[1:1] = [f"step        {summary['step']}", f"saved at    {saved}"]
    if summary["adapter"]:
        record = summary["adapter"]
        of = f"of {record['base']['path'] or 'an unnamed base'}, {record['base']['identity'] or 'unverified'}"
        lines.append(f"adapter     {record['adapter'].get('peft_type')}, rank {record['adapter'].get('r')}, {of}")
    return [*lines, ""]


def _tree(tensors: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a tree of the tensors' dotted names: one line per tensor, and one per prefix that it begins."""
    lines: list[str] = []
    before: list[str] = []
    for name, tensor in tensors.items():
        words = name.split(".")
        shared = next(
            (i for i, (a, b) in enumerate(zip(words, before, strict=False)) if a != b), min(len(words), len(before))
        )
        for depth in range(min(shared, len(words) - 1), len(words) - 1):
            lines.append(f"{'  ' * depth}{words[depth]}")
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        slots = ", ".join(f"{slot} {code}" for slot, code in tensor["slots"].items())
        lines.append(f"{'  ' * (len(words) - 1)}{words[-1]}  {shape}  {slots}  {format_bytes(tensor['bytes'])}")
        before = words
    return lines
