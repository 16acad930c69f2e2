"""`tk top`: the load of a running server, live on a terminal."""

import time
from typing import TYPE_CHECKING, Any, Final

import click

from ..core.progress import format_bytes
from .common import print_json
from .connection_options import connection_options, take_credentials

if TYPE_CHECKING:
    from rich.table import Table

_TIMEOUT_SECONDS: Final = 10.0
_BAR_WIDTH: Final = 40
_STATE_STYLES: Final = (("serving", "green"), ("failed", "red"))


@click.command(epilog="Example: tk top 127.0.0.1:50051")
@click.argument("address", metavar="HOST:PORT")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--once", is_flag=True, help="Look once.")
@click.option("--json", "as_json", is_flag=True, help="Print each look as one JSON document.")
@connection_options
def top(address: str, interval: float, once: bool, as_json: bool, **options: Any) -> None:
    """Show the load of the server at HOST:PORT (its --admin-port, if it has one) until Ctrl-C.

    On a server with tokens this needs one with the role admin, in the environment variable TK_TOKEN.
    """
    from rich.console import Console
    from rich.live import Live

    from ..infer.client.connection import LoadReader

    with LoadReader(
        address, timeout=_TIMEOUT_SECONDS, max_attempts=1, credentials=take_credentials(options)()
    ) as reader:
        if as_json:
            print_json(reader.read())
            while not once:
                time.sleep(interval)
                print_json(reader.read())
        elif once:
            Console().print(view(address, reader.read()))
        else:
            with Live(view(address, reader.read()), auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(view(address, reader.read()), refresh=True)


def view(address: str, load: dict[str, Any]) -> "Table":
    """Returns the table of a load, as `LoadReader.read` returns it."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", show_header=False, title=address, title_justify="left")
    table.add_row("state", Text(load["state"], style=dict(_STATE_STYLES).get(load["state"], "yellow")))
    table.add_row("requests", f"{load['running']} running, {load['waiting']} waiting")
    table.add_row("waiting tokens", f"{load['queued_tokens']:,}")
    table.add_row(
        "tokens per second",
        f"{load['prefill_tokens_per_second']:,.0f} of prompts, {load['decode_tokens_per_second']:,.0f} new",
    )
    table.add_row("cache", _bar(load["blocks_used"], load["blocks_cached"], load["blocks_total"]))
    table.add_row(
        "", f"{load['blocks_used']:,} blocks used, {load['blocks_cached']:,} cached, {load['blocks_free']:,} free"
    )
    table.add_row("prefix hits", f"{load['prefix_hit_rate']:.0%} of prompt tokens")
    if load["draft_weight_bytes"] or load["accepted_share"]:
        gain = f"{load['tokens_per_step']:.2f} tokens per step of a sequence"
        table.add_row("proposals", f"{load['accepted_share']:.0%} came true, {gain}")
    if load["draft_weight_bytes"]:
        weights, cache = format_bytes(load["draft_weight_bytes"]), format_bytes(load["draft_kv_bytes"])
        table.add_row("draft model", f"{weights} of weights, {cache} of KV cache")
    return table


def _bar(used: int, cached: int, total: int) -> str:
    """Returns a bar of the blocks: used, cached, free."""
    first = round(_BAR_WIDTH * used / max(total, 1))
    second = round(_BAR_WIDTH * (used + cached) / max(total, 1)) - first
    return "█" * first + "▒" * second + "·" * (_BAR_WIDTH - first - second)
