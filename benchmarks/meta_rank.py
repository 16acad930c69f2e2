"""One rank of bench_meta.py: `python -m tk.benchmarks.meta_rank CASE`, a `MetaCase` as JSON.

It builds a tiny model on meta and gives it to `initialize`, and then CASE's. It prints by how many bytes its resident
memory rose at most meanwhile, and what is in memory at the end: what Python, torch and communication take is left out.
"""

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tk.benchmarks.training_memory_rank import read_bytes
from tk.train import initialize, on_meta
from tk.train.foreign.blocks import find_blocks

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def build(shape: dict[str, int], options: dict[str, Any]) -> tuple[Any, int, int]:
    """Returns an engine, the bytes of the largest unit as the module makes it, and those after construction."""
    with on_meta():
        model = LlamaForCausalLM(LlamaConfig(**shape))
    built = read_bytes("VmHWM")
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in find_blocks(model).values()]
    rest = sum(parameter.nbytes for parameter in model.parameters()) - sum(blocks)
    return initialize(model, **options), max(rest, *blocks), built


def resident() -> int:
    """Returns the bytes of all tensors that are in memory, each storage once."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():  # parameters that are spread over the ranks refuse
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor) and each.layout == torch.strided and each.device.type == "cpu":
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def main(text: str) -> None:
    """Prints a JSON object."""
    case = json.loads(text)
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    build(TINY | HEADS, case["options"] | {"weights": None})
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    start, seconds = read_bytes("VmRSS"), time.perf_counter()
    engine, unit, built = build(case["shape"], case["options"])
    figures = {"seconds": time.perf_counter() - seconds, "built": built - start, "peak": read_bytes("VmHWM") - start}
    gc.collect()
    held = resident() - before
    print(json.dumps(figures | {"unit": unit, "resident": held, "step_count": engine.step_count}))


if __name__ == "__main__":
    main(*sys.argv[1:])
