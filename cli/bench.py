"""`tk bench`: measurements of a running server."""

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

import click

from ..core.progress import progress_bar
from .common import PATH, print_json
from .connection_options import connection_options, take_credentials

if TYPE_CHECKING:
    from ..infer.client.connection import Credentials
    from ..infer.client.load_test import Observation, Workload

_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?")


class TokenRange(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """The type of an option with a number of tokens, N, or two of them, N-M; the command receives a pair."""

    name = "N|N-M"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = _RANGE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a number of tokens: write 128, or 64-256 for any number between.", param, ctx)
        return int(match[1]), int(match[2] or match[1])


@click.group(epilog="Example: tk bench serve 127.0.0.1:50051 --rate 4")
def bench() -> None:
    """Measure a running server."""


@bench.command(epilog="Example: tk bench serve 127.0.0.1:50051 --rate 4 --first-token-ms 500 --token-ms 50")
@click.argument("address", metavar="HOST:PORT")
@click.option("--rate", metavar="RATE", type=click.FloatRange(0, min_open=True), help="Requests per second (Poisson).")
@click.option("--concurrency", metavar="N", type=click.IntRange(1), help="Requests that run at a time; default: 8.")
@click.option("--requests", metavar="N", type=click.IntRange(1), default=100, show_default=True, help="All requests.")
@click.option("--prompt-tokens", type=TokenRange(), default="128", show_default=True, help="Length of prompts.")
@click.option("--new-tokens", type=TokenRange(), default="64", show_default=True, help="Length of answers.")
@click.option(
    "--shared-prefix",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    help="Tokens with which every prompt begins; default: 0.",
)
@click.option("--temperature", metavar="T", type=click.FloatRange(0), default=1.0, show_default=True, help="0: greedy.")
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of prompts, lengths and times.")
@click.option("--first-token-ms", metavar="MS", type=click.FloatRange(0), help="Target for the first token's time.")
@click.option("--token-ms", metavar="MS", type=click.FloatRange(0), help="Target for the mean time per later token.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
@click.option("-o", "--out", metavar="FILE", type=PATH, help="FILE.svg: distributions of the latencies.")
@connection_options
def serve(address: str, rate: float | None, concurrency: int | None, **options: Any) -> None:
    """Send requests to the server at HOST:PORT and report the latencies of their callers.

    With --rate requests come at random times (a Poisson process), whether or not earlier ones have ended: latencies
    count from the time at which a request was due. With --concurrency each caller waits for its answer before it sends
    the next request. Refused requests are counted, not repeated. The token for a server that needs one is read from the
    environment variable TK_TOKEN.
    """
    from ..infer.client.load_test import Targets, Workload, draw, summary, table

    if rate is not None and concurrency is not None:
        raise click.UsageError("--rate and --concurrency exclude each other: one decides when a request is sent.")
    credentials = take_credentials(options)()
    workload = Workload(
        num_requests=options["requests"],
        **{name: options[name] for name in ("prompt_tokens", "new_tokens", "shared_prefix", "temperature", "seed")},
    )
    observations = asyncio.run(_run(address, credentials, workload, rate, concurrency or 8))
    result = summary(observations, Targets(_seconds(options["first_token_ms"]), _seconds(options["token_ms"])))
    if options["out"] is not None:
        options["out"].write_text(draw(observations))
    if options["as_json"]:
        print_json(result)
    else:
        click.echo(table(result))


async def _run(
    address: str, credentials: "Credentials", workload: "Workload", rate: float | None, concurrency: int
) -> "list[Observation]":
    from ..infer.client.client import AsyncClient
    from ..infer.client.load_test import LoadTest

    async with AsyncClient(address, max_attempts=1, credentials=credentials) as client:
        info = await client.model_info()
        with progress_bar(f"{info.name} at {address}", workload.num_requests) as bar:
            test = LoadTest(client, workload, info.vocab_size, lambda seen: bar.advance(1, seen.status))
            return await (test.at_concurrency(concurrency) if rate is None else test.at_rate(rate))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
