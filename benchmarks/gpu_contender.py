"""One contender of bench_gpu.py: `python -m tk.benchmarks.gpu_contender NAME`."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F

from tk.core.config import parse
from tk.train.config.train_config import TrainConfig
from tk.train.context.dealing import deal
from tk.train.context.kernels import PortableTileKernel, Tensors, TileKernel, kernel_for
from tk.train.context.tiled import attend_tiles, differentiate_tiles
from tk.train.context.tiles import AttentionTile, tiles
from tk.train.run.trainer import Trainer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CUDA: Final = torch.device("cuda")
VOCAB_SIZE: Final = 16384
ROWS, MICRO, LENGTH = 8, 4, 4096
SHAPE: Final = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
}
CACHE: Final = Path(".build/bench/stdlib")
WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpyAsync", "cudaLaunchKernel", "aten::item")
PROMPT, ANSWER = 128, 128  # tokens of decoding


def seconds(run: Callable[[], object], warm_up: int = 2, counted: int = 6) -> float:
    """Returns the median time of a call, with the GPU's work."""
    found = []
    for _ in range(warm_up + counted):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[warm_up:])


def limits() -> None:
    """The rate of matrix products and of copies, which all other figures are seen beside."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    left, right = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    print(f"bf16 products: {2 * 8192**3 / seconds(lambda: left @ right) / 1e12:.0f} TFLOP/s")
    source = torch.empty(2**30, device=CUDA, dtype=torch.float32)
    target = torch.empty_like(source)
    print(f"copies: {2 * 4 * 2**30 / seconds(lambda: target.copy_(source)) / 1e12:.2f} TB/s")


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
        print(
            f"{length} tokens, cp {cp}: {len(found)} tiles {flash * 1e3:.2f} ms ({type(kernel_for(q)).__name__}), "
            f"portable {portable * 1e3:.1f} ms, torch's whole row {base * 1e3:.2f} ms: {flash * cp / base:.2f} of its "
            "time per pair"
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
    print(
        f"{name}: {tokens:.0f} tokens/s, {tokens * per_token / 1e12:.0f} TFLOP/s of the model, "
        f"first step {first:.1f} s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
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


def transformers_model() -> "LlamaForCausalLM":
    """Returns the same model of transformers, with fp32 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with CUDA:
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=False, **SHAPE))


def train_transformers(compiled: bool) -> None:
    """Training steps of transformers under autocast, with torch's fused AdamW."""
    model = transformers_model()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = torch.randint(0, VOCAB_SIZE, (ROWS, LENGTH), device=CUDA)

    def step() -> None:
        for some in rows.split(MICRO):
            with torch.autocast("cuda", torch.bfloat16):
                loss = forward(input_ids=some, labels=some, use_cache=False).loss
            (loss * MICRO / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    parameters = sum(each.numel() for each in model.parameters())
    report("transformers compiled" if compiled else "transformers", step, parameters)


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
            print(
                f"training waits {time.perf_counter() - start:.2f} s" + (" until the step is committed" if wait else "")
            )


def decode_tk() -> None:
    """Decoding by tk's ATen backend."""
    from tk.infer import LLM, SamplingParams

    folder = Path(os.environ["TK_BENCH_RUN"]).with_name("hf")
    transformers_model().bfloat16().save_pretrained(folder)
    torch.cuda.empty_cache()
    sampling = SamplingParams(temperature=0, max_new_tokens=ANSWER, ignore_eos=True)
    with LLM(folder, kernels="aten", kv_memory=8 << 30) as llm:
        for batch in (1, 32):
            prompts = [[1 + (row * 7 + at) % 1000 for at in range(PROMPT)] for row in range(batch)]
            llm.generate(prompts, sampling)
            start = time.perf_counter()
            llm.generate(prompts, sampling)
            duration = time.perf_counter() - start
            print(f"tk aten, batch {batch}: {batch * ANSWER / duration:.0f} tokens/s, prompts of {PROMPT} included")


def decode_transformers() -> None:
    """Decoding by generate of transformers."""
    model = transformers_model().bfloat16().eval()
    for batch in (1, 32):
        prompts = torch.randint(1, 1000, (batch, PROMPT), device=CUDA)
        options = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}

        def run(prompts: torch.Tensor = prompts, options: dict[str, Any] = options) -> object:
            return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)

        duration = seconds(run, 1, 1)
        print(f"transformers, batch {batch}: {batch * ANSWER / duration:.0f} tokens/s, prompts of {PROMPT} included")


RUNS: Final[dict[str, Callable[[], None]]] = {
    "limits": limits,
    "tiles": compare_tiles,
    "train-tk": lambda: train_tk(False),
    "train-tk-compile": lambda: train_tk(True),
    "train-transformers": lambda: train_transformers(False),
    "train-transformers-compile": lambda: train_transformers(True),
    "save-tk": save_tk,
    "decode-tk": decode_tk,
    "decode-transformers": decode_transformers,
}

if __name__ == "__main__":
    RUNS[sys.argv[1]]()
