"""The memory of a rank, traced at the allocator, equals the memory that `tk plan` computes."""

import gc
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tk.checkpoint.save.save_job import Buffers
from tk.core.config import parse
from tk.parallel.mesh import Mesh
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.planning.placed_bytes import PlacedBytes
from tk.train.planning.plan import make_plan
from tk.train.run.trainer import Trainer

STATES = ("parameters", "gradients", "optimizer")
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _levels(traced: profile) -> list[int]:
    """Returns the bytes allocated since the trace began, after each allocation and release."""
    recorded: Any = traced.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    level, levels = 0, [0]
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        levels.append(level)
    return levels


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Returns this rank's bytes between steps, at the peak of the second step, of the copy for saves, and its plan."""
    parsed = parse(config, TrainConfig, "test")
    world = torch.distributed.get_world_size()
    mesh = Mesh.build(parsed.layout(world), 2)
    gc.collect()  # so that garbage of an earlier test is not released during the trace
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as building:
        trainer = Trainer(parsed, mesh)
    trainer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as stepping:
        trainer.step()
    held = _levels(building)[-1]
    plan = make_plan(parsed, world)
    with trainer.checkpointer.open(trainer.save_options()) as run:
        source = trainer.engine.optimizer.pin()  # as a save does that reads states on disk
        copy = Buffers(run.saver.job, source.slots if source else ()).nbytes
        trainer.engine.optimizer.unpin()
    return {
        "held": held,
        "peak": held + max(_levels(stepping)),
        "copy": copy,
        "plan": asdict(plan.memory[mesh.coordinates.pp]),
    }


HOST: dict[str, Any] = dict.fromkeys(("optimizer", "gradients", "parameters"), "cpu")
DISK: dict[str, Any] = dict.fromkeys(HOST, "disk") | {"buffers": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": {"stage": 0}},
    "zero 1": {"zero": {"stage": 1}},
    "zero 2": {"zero": {"stage": 2}},
    "zero 3": {"zero": {"stage": 3}},
    "zero 3 bf16": {"zero": {"stage": 3}, "precision": {"params": "bf16"}},
    "zero 1 bf16": {"zero": {"stage": 1}, "precision": {"params": "bf16"}},
    "tp": {"parallel": {"tp": 2, "dp": 1}},
    "pp": {"parallel": {"pp": 2, "dp": 1}},
    "tp, sequence parallel": {"parallel": {"tp": 2, "dp": 1, "sequence_parallel": True}},
    "selective recompute": {"recompute": {"mode": "selective"}},
    "full recompute": {"recompute": {"mode": "full"}},
    "zero 3 bf16, all on the host": {"zero": {"stage": 3}, "precision": {"params": "bf16"}, "offload": HOST},
    "zero 3 bf16, all on disk": {"zero": {"stage": 3}, "precision": {"params": "bf16"}, "offload": DISK},
    "zero 1, states on disk": {"zero": {"stage": 1}, "offload": {"optimizer": "disk", "buffers": 3}},
}
OFFLOADED = tuple(
    name for name, sections in LAYOUTS.items() if "offload" in sections and name != "zero 3 bf16, all on disk"
)
SIMILAR = (
    *OFFLOADED,
    "zero 0",
    "zero 1",
    "zero 3",
    "zero 1 bf16",
    "tp",
    "selective recompute",
)  # to others, which `make test` has


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in SIMILAR else ()) for name in LAYOUTS]
)
def test_a_rank_has_the_memory_of_the_plan(rank_pool: RankPool, configure: Configure, name: str) -> None:
    config = configure(
        "memory",
        **{
            "model": MODEL,
            "train": {"steps": 3, "seq_len": 128, "global_batch_size": 8, "micro_batch_size": 2},
            "zero": {"bucket_size": 2**18},
            "checkpoint": {"every": 1},
            **{key: value for key, value in LAYOUTS[name].items() if key != "zero"},
        },
    )
    config["zero"] |= LAYOUTS[name].get("zero", {})
    results = rank_pool.run(measure, 2, config=config)
    placed = [PlacedBytes(**result["plan"]) for result in results]
    copies = [each.host["copy for saves"] for each in placed]
    written = [result["copy"] for result in results]
    assert written[0] == copies[0], "the first rank writes most"
    assert all(mine == copy if name == "pp" else mine <= copy for mine, copy in zip(written, copies, strict=True))
    for result, each in zip(results, placed, strict=True):
        kept = [size for place in (each.device, each.host) for part, size in place.items() if part in STATES]
        assert result["held"] == pytest.approx(sum(kept), rel=0.05, abs=4096)
        mapped = each.host["copy for saves"] + each.host.get("buffers of files", 0)  # not by the allocator
        assert result["peak"] == pytest.approx(each.on_cpu - mapped, rel=0.10)
