"""First tokens and shares of principals beside one that fills all places and the queue of a real server."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import grpc

from tk.benchmarks.peers.environments import BUILD
from tk.benchmarks.random_model import VOCAB_SIZE, random_model
from tk.benchmarks.serving.grpc_load import LoadedServer
from tk.benchmarks.serving.in_turn import Promise
from tk.core.cpu import read_cpu
from tk.infer.serve.access.tokens import GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub

WAIT_BOUND: Final = 2.0  # seconds, beside those of the same prompt alone
JAIN_BOUND: Final = 0.95
PROMPT: Final = 20
LONG: Final = 400  # new tokens
QUEUED: Final = 200


@dataclass
class Principal:
    """A principal's calls: the tokens that they got, and the seconds that their first tokens took."""

    name: str
    tokens: int = 0
    waits: list[float] = field(default_factory=list)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="A model; default: a random one of 135 M parameters.")
@click.option("--others", type=int, default=8, show_default=True, help="Principals beside the one that takes all.")
@click.option("--max-running", type=int, default=8, show_default=True)
@click.option("--seconds", type=float, default=30.0, show_default=True, help="The duration of each of two loads.")
@click.option("--threads", type=int, default=2, show_default=True, help="Threads of the workers.")
def main(model: Path | None, others: int, max_running: int, seconds: float, threads: int) -> None:
    """Print the first tokens of short calls beside a principal that takes all, and Jain's index among equal ones."""
    print(read_cpu().model)
    folder = model or random_model(BUILD / "bench" / "llama-135m")
    with tempfile.TemporaryDirectory() as scratch:
        tokens, names = Path(scratch) / "tokens", ["hog", *(f"p{i}" for i in range(others))]
        tokens.write_text("".join(line_of(token_digest(name), Caller(name, frozenset({GENERATE}))) for name in names))
        limits = ("--max-running", str(max_running), "--max-queued", str(QUEUED), "--threads", str(threads))
        with closing(LoadedServer(folder, "--tokens", str(tokens), *limits)) as served:
            promises = asyncio.run(_loads(served.target, names, max_running, seconds))
    for promise in promises:
        print(promise.line())
    print("verdict:", "all kept" if all(promise.is_kept for promise in promises) else "MISSED")


async def _loads(target: str, names: Sequence[str], max_running: int, seconds: float) -> list[Promise]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationStub(channel)
        alone = Principal(names[1])
        for _ in range(5):
            await _call(stub, alone, 2)
        hog, short = Principal(names[0]), [Principal(name) for name in names[1:]]
        print(f"alone, s: {min(alone.waits):.2f}; now one takes all, for {0.75 * seconds:.0f} s", flush=True)
        greedy = [asyncio.create_task(_repeat(stub, hog, LONG, seconds)) for _ in range(max_running + QUEUED)]
        await asyncio.sleep(seconds / 4)
        await asyncio.gather(*(_repeat(stub, each, 2, seconds / 2, pause=1.0) for each in short))
        waits = sorted(wait for each in short for wait in each.waits)
        print(f"first tokens beside one that takes all, s: p50 {waits[len(waits) // 2]:.2f}, longest {waits[-1]:.2f}")
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        await asyncio.sleep(2.0)  # until the server has ended them too
        print(f"now {len(names)} take all, for {seconds:.0f} s", flush=True)
        equal = [Principal(name) for name in names]
        num_calls = min(max_running, (max_running + QUEUED) // len(names))  # of each: there is room for no more
        await asyncio.gather(*(_repeat(stub, each, LONG, seconds) for each in equal for _ in range(num_calls)))
    counts = [each.tokens for each in equal]
    print(f"tokens of equal principals: {' '.join(map(str, counts))}")
    jain = sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))
    return [
        Promise("the longest of them without that alone, s", waits[-1] - min(alone.waits), WAIT_BOUND, most=True),
        Promise("Jain's index of tokens among equal principals", jain, JAIN_BOUND),
    ]


async def _repeat(stub: Any, who: Principal, new_tokens: int, seconds: float, pause: float = 0.0) -> None:
    """Calls one after the other for so long; the last one is cut."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                await _call(stub, who, new_tokens)
                await asyncio.sleep(pause)
    except TimeoutError:
        return


async def _call(stub: Any, who: Principal, new_tokens: int) -> None:
    ids = [(7 * place + len(who.waits) + sum(who.name.encode())) % VOCAB_SIZE for place in range(PROMPT)]
    request = pb.GenerateRequest(tokens={"ids": ids})
    request.stopping.max_new_tokens, request.stopping.ignore_eos = new_tokens, True
    begun, is_first = time.perf_counter(), True
    async for event in stub.Generate(request, metadata=(("authorization", f"Bearer {who.name}"),)):
        if event.WhichOneof("event") == "delta":
            who.tokens += len(event.delta.token_ids)
            if is_first:
                who.tokens += PROMPT
                who.waits.append(time.perf_counter() - begun)
                is_first = False


if __name__ == "__main__":
    main()
