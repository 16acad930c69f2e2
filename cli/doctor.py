"""`tk doctor`: a report on this machine's hardware, limits and software, with remedies for missing parts."""

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import PathType, print_json
from .invocation import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.native import NativeSource
    from .machine import Fact

_MARKS = {"ok": " ", "note": "!", "broken": "x"}
_SECTIONS = ("machine", "limits", "software", "tk uses")


@click.command(epilog="Example: tk doctor --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--build",
    "folder",
    metavar="FOLDER",
    type=PathType(file_okay=False, path_type=Path),
    help="Only compile native code, into a folder that TK_KERNELS names where there is no compiler, as in an image.",
)
@click.option(
    "--disk",
    metavar="FOLDER",
    type=PathType(exists=True, file_okay=False, path_type=Path),
    help="Only measure the disk of a folder, as [offload] reads and writes there, for some 4 seconds.",
)
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, folder: Path | None, disk: Path | None) -> None:
    """Show this machine's hardware, limits and software, the parts that tk will use, and how to get missing ones.

    Exits with 1 if a part that tk needs is missing or broken, for example if torch is too old. With --disk or --build
    it does only that.
    """
    from .gpu_facts import gpu_facts
    from .machine import examine
    from .native_facts import native_facts
    from .native_sources import native_sources

    if disk is not None:
        _measure(disk, as_json)
        return
    if folder is not None:
        _build(native_sources(), folder, as_json)
        return
    facts = sorted(
        [*examine(), *gpu_facts(), *native_facts(native_sources())], key=lambda fact: _SECTIONS.index(fact.section)
    )
    broken = [fact for fact in facts if fact.state == "broken"]
    if as_json:
        print_json({"healthy": not broken, "facts": [asdict(fact) for fact in facts]})
    else:
        click.echo("\n\n".join(_table(facts)))
    ctx.exit(1 if broken else 0)


def _build(sources: "Sequence[NativeSource]", folder: Path, as_json: bool) -> None:
    from ..core.native.image import fill_folder

    built = []
    for path, record in fill_folder(sources, folder, say):
        built.append({"path": str(path), **asdict(record)})
        if not as_json:
            click.echo(f"{path}: {', '.join(record.units)}, by {record.compiler}")
    if as_json:
        print_json({"libraries": built})
    else:
        click.echo(f"export TK_KERNELS={folder.absolute()}")


def _measure(folder: Path, as_json: bool) -> None:
    from .disk_speed import measure_disk

    speed = measure_disk(folder)
    if as_json:
        print_json({"folder": str(folder), **asdict(speed)})
        return
    read, written = (max(1, round(rate / 1e6)) for rate in (speed.read, speed.written))
    click.echo(f"{folder}: reads {read:,} MB/s, writes {written:,} MB/s")
    click.echo(f"tk plan CONFIG.toml --disk-rate {read}:{written}")


def _table(facts: "list[Fact]") -> list[str]:
    """Returns one block of lines per section; a fact with a problem is marked and followed by its remedy."""
    width = max(len(fact.name) for fact in facts)
    blocks = []
    for section, members in groupby(facts, key=lambda fact: fact.section):
        lines = [section]
        for fact in members:
            lines.append(f"{_MARKS[fact.state]} {fact.name:<{width}}  {fact.value}")
            if fact.hint:
                lines.append(f"  {'':<{width}}  -> {fact.hint}")
        blocks.append("\n".join(lines))
    return blocks
