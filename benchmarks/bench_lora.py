"""Steps of training with an adapter of rank 16: tk beside peft and transformers, and beside tk without an adapter.

All are in one process and take turns step by step, so that a change of the machine's speed meets each. Shown are
seconds of CPU time, which processes beside this one change little; of several threads it counts idle ones that wait,
too. The model is a Llama with the sizes below and random weights; activations are not recomputed.
"""

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import click
import torch

from tk.core.config import parse
from tk.core.cpu import read_cpu
from tk.parallel.mesh import Mesh
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

RANK, ROWS, LENGTH = 16, 2, 512
Step = Callable[[], object]
OURS: Final = "tk, adapter"


def model_sizes(hidden: int, layers: int) -> dict[str, int]:
    """Returns the sizes of a Llama, as tk and transformers name them."""
    return {
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": LENGTH,
    }


def step_of_tk(sizes: dict[str, int], precision: str, folder: str, compiled: bool = False, **sections: Any) -> Step:
    """Returns a training step of tk."""
    data: dict[str, Any] = {
        "model": sizes,
        "data": {"cache": ".build/bench/stdlib", "vocab_size": sizes["vocab_size"]},
        "train": {"global_batch_size": ROWS, "micro_batch_size": ROWS, "seq_len": LENGTH, "compile": compiled},
        "precision": {"params": precision},
        "checkpoint": {"dir": folder},
    }
    config = parse(data | sections, TrainConfig, "the benchmark")
    return Trainer(config, Mesh.alone(config.layout(1))).step


def step_of_peft(sizes: dict[str, int], precision: str, wide: bool, compiled: bool) -> Step:
    """Returns a training step of peft; `wide` says whether its factors are fp32, as they are by default."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    base.to({"bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    options = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model: Any = get_peft_model(base, options, autocast_adapter_dtype=wide)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-3, fused=True)
    rows = torch.randint(0, sizes["vocab_size"], (ROWS, LENGTH))
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        forward(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@click.command()
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--only", default=".*", show_default=True, help="Contenders beside the first whose names match.")
def main(precision: str, hidden: int, layers: int, rounds: int, threads: int, only: str) -> None:
    """Print a table in Markdown: the median CPU seconds of a step, and the median of their ratios to tk's own."""
    torch.set_num_threads(threads)
    sizes, cpu = model_sizes(hidden, layers), read_cpu()
    with tempfile.TemporaryDirectory() as folder:
        ours = partial(step_of_tk, sizes, precision, folder)
        peft = partial(step_of_peft, sizes, precision)
        contenders: dict[str, Callable[[], Step]] = {
            OURS: partial(ours, lora={"rank": RANK}),
            "tk, adapter, compiled": partial(ours, lora={"rank": RANK}, compiled=True),
            "tk, all weights": ours,
            "tk, all weights, compiled": partial(ours, compiled=True),
            "peft, factors in fp32": partial(peft, wide=True, compiled=False),
            "peft, factors in fp32, compiled": partial(peft, wide=True, compiled=True),
        }
        if precision != "fp32":
            contenders |= {
                f"peft, factors in {precision}": partial(peft, wide=False, compiled=False),
                f"peft, factors in {precision}, compiled": partial(peft, wide=False, compiled=True),
            }
        steps = {name: make() for name, make in contenders.items() if name == OURS or re.fullmatch(only, name)}
        seconds = measured(steps, rounds)
    click.echo(f"{cpu.model}, {', '.join(cpu.instruction_sets)}; {precision}, hidden {hidden}, {layers} layers\n")
    click.echo("| | CPU s/step | of tk's |\n|---|---|---|")
    for name, found in seconds.items():
        ratio = statistics.median(other / own for other, own in zip(found, seconds[OURS], strict=True))
        click.echo(f"| {name} | {statistics.median(found):.3f} | {ratio:.2f} |")


def measured(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of each contender's steps, after two that warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if number > 1:
                seconds[name].append(time.process_time() - start)
    return seconds


if __name__ == "__main__":
    main()
