"""One rank of DeepSpeed's MoE in bench_axes.py: `-m tk.benchmarks.peers.deepspeed_moe SHAPE RANK`, ep 2, ZeRO off.

SHAPE is JSON: the keys of a model as tk's [model] has them, this rank's rows, their length, and the precision. The
model is transformers' Llama, whose MLPs are DeepSpeed mixtures of SwiGLU experts: top 2, with no token dropped. It runs
in DeepSpeed's own environment (environments.py), and a step for every line of standard input.
"""

import json
import os
import sys
import time
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANKS = 2


class SwigluExpert(nn.Module):
    """An expert, as in Mixtral."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., hidden] to [..., hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return y


class MixtureInPlace(nn.Module):
    """DeepSpeed's mixture where transformers expects a block that returns its output alone."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [B, L, hidden] to [B, L, hidden]."""
        y: torch.Tensor = self.mixture(x)[0]
        return y


def make_model(keys: dict[str, Any]) -> nn.Module:
    """Makes the model with random fp32 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    mixture_of_experts = import_module("deepspeed.moe.layer").MoE

    torch.manual_seed(0)
    own = ("architecture", "num_local_experts", "num_experts_per_tok")
    shape = {key: value for key, value in keys.items() if key not in own}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **shape))
    hidden = keys["hidden_size"]
    for layer in model.get_submodule("model.layers").children():
        mixture = mixture_of_experts(
            hidden_size=hidden,
            expert=SwigluExpert(hidden, keys["intermediate_size"]),
            num_experts=keys["num_local_experts"],
            ep_size=RANKS,
            k=keys["num_experts_per_tok"],
            drop_tokens=False,
        )
        layer.mlp = MixtureInPlace(mixture)
    return model


def main(shape: str, rank: str) -> None:
    """Runs one step for every line of standard input, and writes its seconds."""
    deepspeed, given = import_module("deepspeed"), json.loads(shape)
    groups_of = import_module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", f"file://{os.environ['TK_BENCH_STORE']}", rank=int(rank), world_size=RANKS)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    model = make_model(given["model"])
    parameters = groups_of({"params": list(model.parameters()), "name": "all"})
    options = {
        "train_micro_batch_size_per_gpu": given["rows"],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": given["precision"] == "bf16"},
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
    tokens = torch.randint(0, given["model"]["vocab_size"], (given["rows"], given["length"]))
    for _ in sys.stdin:
        dist.barrier()
        start = time.perf_counter()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        dist.barrier()
        print(time.perf_counter() - start, file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # DeepSpeed prints beside the answers
        main(*sys.argv[1:])
