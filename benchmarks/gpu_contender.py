"""One contender of bench_gpu.py: `python -m tk.benchmarks.gpu_contender NAME`."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from tk.benchmarks.gpu_decode import decode_tk, decode_transformers, decode_vllm
from tk.benchmarks.gpu_model import CUDA, LENGTH, SHAPE, VOCAB_SIZE, figure, seconds, transformers_model
from tk.benchmarks.gpu_titan import titan_model
from tk.core.config import parse
from tk.core.gpu_cards import card_named
from tk.train.config.train_config import TrainConfig
from tk.train.context.dealing import deal
from tk.train.context.kernels import PortableTileKernel, Tensors, TileKernel, kernel_for
from tk.train.context.tiled import attend_tiles, differentiate_tiles
from tk.train.context.tiles import AttentionTile, tiles
from tk.train.run.trainer import Trainer

ROWS, MICRO = 8, 4
CACHE: Final = Path(".build/bench/stdlib")


def limits() -> None:
    """The rate of matrix products and of copies, which all other figures are seen beside."""
    left, right = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    figure("bf16 products of 8,192 x 8,192", f"{2 * 8192**3 / seconds(lambda: left @ right) / 1e12:.0f} TFLOP/s")
    source = torch.empty(2**30, device=CUDA, dtype=torch.float32)
    target = torch.empty_like(source)
    rate = 2 * 4 * 2**30 / seconds(lambda: target.copy_(source)) / 1e12
    figure("copies on the GPU, bytes read and written", f"{rate:.2f} TB/s")


def compare_tiles() -> None:
    """Attention of rank 0 of cp ranks over fetched keys, forward and backward, beside torch's of a whole row."""
    for length, cp in ((8192, 1), (8192, 2), (32768, 4)):
        q, k, v = (torch.randn(length, heads, 128, device=CUDA, dtype=torch.bfloat16) for heads in (16, 4, 4))
        q_1HLE, k_1KLE, v_1KLE = (each.transpose(0, 1)[None].requires_grad_() for each in (q, k, v))
        found = tiles(deal(1, length, (), [None], cp), 0, None)
        mine = (q[: length // cp], k, v)
        base = seconds(partial(torchs_attention, (q_1HLE, k_1KLE, v_1KLE), torch.randn_like(q_1HLE)))
        flash = seconds(partial(tiled_attention, mine, found, kernel_for(q)))
        portable = seconds(partial(tiled_attention, mine, found, PortableTileKernel()), 1, 1)
        figure(
            f"attention of {length:,} tokens, cp {cp}, in {len(found)} tiles ({type(kernel_for(q)).__name__})",
            f"{flash * 1e3:.2f} ms; portable {portable * 1e3:.1f} ms; torch's whole row {base * 1e3:.2f} ms: "
            f"{flash * cp / base:.2f} of its time per pair",
        )


def torchs_attention(whole: Tensors, grad: torch.Tensor) -> None:
    """Torch's causal attention, forward and backward."""
    out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    torch.autograd.grad(out, whole, grad)


def tiled_attention(qkv: Tensors, found: Sequence[AttentionTile], kernel: TileKernel) -> None:
    """The tiles of one rank, forward and backward."""
    out, lse = attend_tiles(qkv, found, kernel, None)
    differentiate_tiles(qkv, (out, out, lse), found, kernel, None)


def make_trainer(compiled: bool) -> Trainer:
    """Returns the trainer of one rank in bf16 with fp32 masters."""
    config = {
        "model": {"architecture": "llama", "tie_word_embeddings": False, **SHAPE},
        "data": {"cache": str(CACHE), "vocab_size": VOCAB_SIZE},
        "train": {"global_batch_size": ROWS, "micro_batch_size": MICRO, "seq_len": LENGTH, "compile": compiled},
        "precision": {"params": "bf16"},
        "checkpoint": {"dir": os.environ["TK_BENCH_RUN"]},
    }
    return Trainer(parse(config, TrainConfig, "the benchmark"), device=CUDA)


def report(name: str, step: Callable[[], object], num_parameters: int) -> None:
    """Times training steps and prints their speed and memory."""
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    duration = seconds(step)
    per_token = 6 * num_parameters + 6 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * LENGTH
    tokens = ROWS * LENGTH / duration
    card, rate = card_named(torch.cuda.get_device_name()), tokens * per_token
    mfu = f", MFU {rate / card.flops:.2f}" if card else ""
    figure(
        f"training with {name}, {num_parameters / 1e9:.2f} B parameters, rows of {LENGTH:,}",
        f"{tokens:,.0f} tokens/s, {rate / 1e12:.0f} TFLOP/s of the model{mfu}, first step {first:.1f} s, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
    )


def train_tk(compiled: bool) -> None:
    """Training steps of tk."""
    trainer = make_trainer(compiled)
    report(
        "tk compiled" if compiled else "tk",
        trainer.step,
        sum(each.numel() for stage in trainer.stages for each in stage.parameters()),
    )
    if not compiled:
        profile(trainer.step)


def profile(step: Callable[[], object]) -> None:
    """Prints the operations of one step by their time on the GPU, and how often the CPU waited for it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        step()
        torch.cuda.synchronize()
    averages = found.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=18, max_name_column_width=60))
    for event in averages:
        if event.key in (
            "cudaStreamSynchronize",
            "cudaDeviceSynchronize",
            "cudaMemcpyAsync",
            "cudaLaunchKernel",
            "aten::item",
        ):
            print(f"{event.key}: {event.count} times, {event.cpu_time_total / 1e3:.1f} ms of the CPU")


def train_transformers(compiled: bool) -> None:
    """Training steps of transformers."""
    model = transformers_model()
    forward = torch.compile(model) if compiled else model
    name = "transformers compiled" if compiled else "transformers"
    train_module(name, model, lambda rows: forward(input_ids=rows, labels=rows, use_cache=False).loss)


def train_titan() -> None:
    """Training steps of torchtitan, where it is installed: it compiles layers."""
    if find_spec("torchtitan") is None:
        print("torchtitan is not installed")
        return
    model = titan_model()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows)[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())

    train_module("torchtitan compiled", model, loss)


def train_module(name: str, model: torch.nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Reports training steps of a model with fp32 parameters under autocast, with torch's fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = torch.randint(0, VOCAB_SIZE, (ROWS, LENGTH), device=CUDA)

    def step() -> None:
        for some in rows.split(MICRO):
            with torch.autocast("cuda", torch.bfloat16):
                mean = loss(some)
            (mean * MICRO / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    report(name, step, sum(each.numel() for each in model.parameters()))


def save_tk() -> None:
    """The time for which training waits for saves: one in the background, one by itself, one in the background."""
    trainer = make_trainer(False)
    with trainer.checkpointer.open(trainer.save_options()) as run:
        for wait in (False, True, False):
            trainer.step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run.saver.save(trainer.state.step, trainer.resume_state().to_json(), wait=wait)
            run.saver.flush_pending()
            torch.cuda.synchronize()
            what = "a save that training waits for" if wait else "a save in the background: training waits"
            figure(what, f"{time.perf_counter() - start:.2f} s")


RUNS: Final[dict[str, Callable[[], None]]] = {
    "limits": limits,
    "tiles": compare_tiles,
    "train-tk": lambda: train_tk(False),
    "train-tk-compile": lambda: train_tk(True),
    "train-transformers": lambda: train_transformers(False),
    "train-transformers-compile": lambda: train_transformers(True),
    "train-torchtitan": train_titan,
    "save-tk": save_tk,
    "decode-tk": decode_tk,
    "decode-transformers": decode_transformers,
    "decode-vllm": decode_vllm,
}

if __name__ == "__main__":
    RUNS[sys.argv[1]]()
