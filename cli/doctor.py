"""`tk doctor`: a report on this machine's hardware, limits and software, with remedies for what is missing."""

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import click

from .common import print_json

if TYPE_CHECKING:
    from .machine import Fact

_MARKS = {"ok": " ", "note": "!", "broken": "x"}
_SECTIONS = ("machine", "limits", "software", "tk uses")


@click.command(epilog="Example: tk doctor --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show this machine's hardware, limits and software, the parts that tk will use, and how to get missing ones.

    Exits with 1 if a part that tk needs is missing or broken, for example if torch is too old.
    """
    from .machine import examine

    facts = sorted(examine(), key=lambda fact: _SECTIONS.index(fact.section))
    broken = [fact for fact in facts if fact.state == "broken"]
    if as_json:
        print_json({"healthy": not broken, "facts": [asdict(fact) for fact in facts]})
    else:
        click.echo("\n\n".join(_table(facts)))
    ctx.exit(1 if broken else 0)


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
