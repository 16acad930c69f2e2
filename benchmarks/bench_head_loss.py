"""A head with its loss, forward and backward: ours in blocks of rows beside torch's linear layer and cross entropy.

python benchmarks/bench_head_loss.py [--pairs 5]

Each measurement is a process of its own on one core; the two of a pair follow each other, in changing order.
"""

import json
import resource
import statistics
import subprocess
import sys
import time

import click
import torch
import torch.nn.functional as F

from tk.core.cpu import read_cpu
from tk.parallel.head_loss import HeadLoss, head_loss
from tk.parallel.linear import ParallelProduct
from tk.parallel.mesh import ALONE

CASES = (("fp32", 4096, 32_000, 512), ("fp32", 1024, 128_256, 512), ("bf16", 4096, 32_000, 512))
WAYS = ("torch", "tk, backward follows", "tk, loss waits")
MIB = 2**20


def run(way: str, dtype: torch.dtype, tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Returns the CPU time of a forward and a backward pass, and the memory that they added to the process, in MiB."""
    torch.set_num_threads(1)
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(1, tokens, hidden, generator=drawn).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=drawn).mul_(0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (1, tokens), generator=drawn)
    head = ParallelProduct("column", ALONE)
    F.linear(x[:, :1], weight[:16])  # the libraries of products are loaded
    before, seconds = peak(), []
    for _ in range(3):
        x.grad = weight.grad = None
        begun = time.process_time()
        if way == "torch":
            logits = F.linear(x, weight).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
        else:
            loss = head_loss(x, weight, head, HeadLoss(targets, vocab, 1.0, way == WAYS[1]))
        loss.backward()
        del loss
        seconds.append(time.process_time() - begun)
    return {"seconds": min(seconds[1:]), "memory": peak() - before}


def peak() -> float:
    """Returns the largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(case: int, way: str) -> dict[str, float]:
    """Runs one measurement in a process of its own."""
    command = [sys.executable, __file__, "--case", str(case), "--way", way]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


@click.command()
@click.option("--pairs", default=5, show_default=True)
@click.option("--case", type=int, hidden=True)
@click.option("--way", type=click.Choice(WAYS), hidden=True)
def main(pairs: int, case: int | None, way: str | None) -> None:
    if case is not None and way is not None:
        name, *sizes = CASES[case]
        print(json.dumps(run(way, {"fp32": torch.float32, "bf16": torch.bfloat16}[name], *sizes)))
        return
    cpu = read_cpu()
    print(f"CPU: {cpu.model} ({', '.join(cpu.instruction_sets)}); one thread\n")
    print("| dtype, tokens x vocabulary, hidden size | way | CPU s | beside torch | range | MiB |")
    print("|---|---|---|---|---|---|")
    for number, (name, tokens, vocab, hidden) in enumerate(CASES):
        rounds = [
            {each: in_a_process(number, each) for each in (WAYS if turn % 2 else WAYS[::-1])} for turn in range(pairs)
        ]
        for each in WAYS:
            ratios = [found[each]["seconds"] / found["torch"]["seconds"] for found in rounds]
            seconds, memory = (statistics.median(found[each][key] for found in rounds) for key in ("seconds", "memory"))
            beside = f"{statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f}"
            label = f"{name}, {tokens:,} x {vocab:,}, {hidden}"
            print(f"| {label} | {each} | {seconds:.2f} | {beside} | {memory:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
