"""Training by DeepSpeed under torchrun: `-m tk.benchmarks.peers.deepspeed_train STAGE`, bf16 with fp32 masters.

It runs in DeepSpeed's own environment (environments.py), with DS_ACCELERATOR=cpu.
"""

import os
import sys
from importlib import import_module

import torch
import torch.distributed as dist

from tk.benchmarks.peers.workload import ROWS, make_model, make_optimizer, make_rows, tokens_per_second


def main(stage: int) -> None:
    """Trains the model; rank 0 prints the speed."""
    deepspeed = import_module("deepspeed")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.init_distributed("gloo")
    world_size = dist.get_world_size()
    model = make_model()
    options = {
        "train_micro_batch_size_per_gpu": ROWS // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=options)
    rows = make_rows(world_size)

    def step() -> None:
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()

    speed = tokens_per_second(step, dist.barrier)
    if dist.get_rank() == 0:
        print(f"DeepSpeed ZeRO-{stage} on {world_size} ranks: {speed}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
