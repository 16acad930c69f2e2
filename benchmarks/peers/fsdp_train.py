"""Training by PyTorch's FSDP2 under torchrun: `-m tk.benchmarks.peers.fsdp_train keep|reshard`, fp32 reductions.

`keep` leaves a layer's parameters gathered after forward (ZeRO-2), `reshard` gathers them again for backward (ZeRO-3).
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tk.benchmarks.peers.workload import make_model, make_optimizer, make_rows, tokens_per_second


def main(mode: str) -> None:
    """Trains the model; rank 0 prints the speed."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make_model()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=mode == "reshard")
    optimizer, rows = make_optimizer(model), make_rows(world_size)

    def step() -> None:
        model(input_ids=rows, labels=rows).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    speed = tokens_per_second(step, dist.barrier)
    if dist.get_rank() == 0:
        print(f"FSDP2 {mode} on {world_size} ranks: {speed}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
