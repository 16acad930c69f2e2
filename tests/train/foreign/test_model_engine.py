"""`initialize` on modules that are not ours: every ZeRO stage is AdamW on one process, and checkpoints carry it all."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import CheckpointError, ConfigError, ShardCorrupt, TkError
from tk.scripts.broken_checkpoints import flip
from tk.tests.rank_pool import RankPool
from tk.train import initialize
from tk.train.zero.absent import AbsentParameter

OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 0.5}
STEPS, ROWS = 4, 4


def _llama(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=tied, **sizes))


def _batch(step: int) -> torch.Tensor:
    return torch.randint(0, 50, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def _expected(tied: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch: losses and weights after STEPS."""
    model = _llama(tied)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=_batch(step), labels=_batch(step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def train_llama(
    zero: Any, tied: bool, save: str = "", load: str = "", checkpointing: bool = False, shard_size: int = 0
) -> list[float]:
    """STEPS steps, each of one row per micro-batch; returns the mean loss over micro-batches and ranks."""
    model = _llama(tied)
    if checkpointing:
        model.gradient_checkpointing_enable()
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    each = ROWS // world
    engine = initialize(model, OPTIMIZER, zero=zero, accumulate=each, shard_size=shard_size, bucket_size=1500)
    if load:
        engine.load(load)
    losses = []
    for step in range(engine.step_count, STEPS):
        total = torch.zeros(())
        for row in _batch(step)[rank * each : (rank + 1) * each].split(1):
            loss = engine({"input_ids": row, "labels": row})
            engine.backward(loss)
            total += loss.detach() / ROWS
            engine.step()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total))
        if save and engine.step_count in (2, STEPS):
            engine.save(save, keep=0)
    engine.close()
    return losses


@pytest.mark.parametrize(
    ("zero", "world", "tied", "checkpointing", "shard_size"),
    [
        pytest.param(0, 2, True, False, 0, marks=pytest.mark.matrix),  # test_foreign_modules.py has every stage
        pytest.param(1, 2, True, False, 0, marks=pytest.mark.matrix),
        pytest.param(2, 2, False, False, 0, marks=pytest.mark.matrix),
        (3, 4, True, True, 2),
        pytest.param(3, 2, True, True, 0, marks=pytest.mark.matrix),
        pytest.param(3, 4, False, False, 2, marks=pytest.mark.matrix),
    ],
)
def test_every_stage_trains_a_transformers_model_as_torch_does(
    rank_pool: RankPool, tmp_path: Path, zero: int, world: int, tied: bool, checkpointing: bool, shard_size: int
) -> None:
    losses, weights = _expected(tied)
    results = rank_pool.run(
        train_llama,
        world,
        zero=zero,
        tied=tied,
        save=str(tmp_path / "run"),
        checkpointing=checkpointing,
        shard_size=shard_size,
    )
    for result in results:
        np.testing.assert_allclose(result, losses, rtol=1e-5)
    saved = Checkpoint.open(tmp_path / "run")
    for name, value in weights.items():
        np.testing.assert_allclose(saved.read(name).numpy(), value.numpy(), rtol=2e-4, atol=2e-6, err_msg=name)
    assert saved.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    resumed = train_llama(0, tied, load=str(tmp_path / "run" / "step-00000002"))
    np.testing.assert_allclose(resumed, losses[2:], rtol=1e-5)


class Odd(nn.Module):
    """Everything that a module may have and a language model has not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(7))
        self.frozen = nn.Parameter(torch.full((3, 5), 0.3), requires_grad=False)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(6).view(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):  # not in the order they are listed
            x = x + torch.tanh(block(x))
        x = self.norm(x) * self.scale + self.frozen.sum(0) + self.empty.sum()
        return (x**2).mean()


def train_odd(zero: Any, folder: str, load: bool) -> dict[str, list[Any]]:
    """One step, saved; or the state after loading that into a module of other values."""
    module = Odd()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    if load:
        for tensor in module.state_dict().values():
            tensor.copy_(torch.zeros_like(tensor))
        engine = initialize(module, OPTIMIZER, zero=zero, bucket_size=20)
        engine.load(folder)
    else:
        engine = initialize(module, OPTIMIZER, zero=zero, bucket_size=20)
        for _ in range(2):
            engine.backward(engine(x))
            assert engine.step()
        engine.save(folder, wait=True)
    with torch.no_grad():
        loss = engine(x)
    return {"loss": [float(loss)], "table": module.get_buffer("table").tolist()}


@pytest.mark.parametrize("zero", [1, 3])
def test_odd_tensors_survive_at_any_stage(rank_pool: RankPool, tmp_path: Path, zero: int) -> None:
    trained = rank_pool.run(train_odd, 2, zero=zero, folder=str(tmp_path / "run"), load=False)
    assert trained[0]["table"] == [[0, 1, 2], [3, 4, 5]]
    checkpoint = Checkpoint.open(tmp_path / "run")
    assert checkpoint.verify().ok
    assert dict(checkpoint.tensors["mask"].slots) == {"weight": "BOOL"}
    assert dict(checkpoint.tensors["frozen"].slots) == {"weight": "F32"}
    assert checkpoint.tensors["scale"].shape == ()
    assert checkpoint.read("empty").numpy().shape == (0, 4)
    assert len(checkpoint.chunks["empty", "weight"]) == 1
    assert checkpoint.read("norm.num_batches_tracked").numpy() == 2
    for stage, world in ((0, 1), (3, 2)):
        again = {"zero": stage, "folder": str(tmp_path / "run"), "load": True}
        loaded = rank_pool.run(train_odd, world, **again)
        np.testing.assert_allclose(loaded[0]["loss"], trained[0]["loss"], rtol=1e-6)
        assert loaded[0]["table"] == trained[0]["table"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_keeps_masters(tmp_path: Path, precision: Any) -> None:
    engine = initialize(_llama(), OPTIMIZER, zero=3, precision=precision)
    engine.backward(engine({"input_ids": _batch(0), "labels": _batch(0)}))
    assert engine.step()
    engine.save(tmp_path / "run", wait=True)
    checkpoint = Checkpoint.open(tmp_path / "run")
    name = "model.layers.0.mlp.up_proj.weight"
    master = checkpoint.read(name, slot="master").torch()
    weight = checkpoint.read(name).torch()
    assert weight.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert torch.equal(weight, master.to(weight.dtype))
    assert checkpoint.layout.zero == 3
    assert isinstance(engine.module.get_parameter(name), AbsentParameter), "gathered only while it is needed"
    assert set(checkpoint.tensors[name].slots) == {"weight", "master", "exp_avg", "exp_avg_sq"}


def test_a_batch_of_nans_updates_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    before = module.get_parameter("0.weight").detach().clone()
    engine = initialize(module, OPTIMIZER)
    engine.backward(engine(torch.full((1, 2), torch.nan)).sum())
    with pytest.raises(TkError, match=r"loss nan.*The loss of rank 0 is not finite.*gradient.*0\.weight"):
        engine.step()
    assert torch.equal(module.get_parameter("0.weight"), before)
    engine.backward(engine(torch.ones(1, 2)).sum())
    assert engine.step(), "the next batch makes a step of its own"
    assert engine.step_count == 1


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        initialize(nn.Linear(2, 2).requires_grad_(False), OPTIMIZER)
    with pytest.raises(ConfigError, match="steps=N"):
        initialize(nn.Linear(2, 2), {"lr": 0.1, "schedule": "cosine"})
    with pytest.raises(ConfigError, match="weight_decay"):
        initialize(nn.Linear(2, 2), {"weight_decya": 0.1})
    _llama().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="weights only"):
        initialize(_llama(), OPTIMIZER).load(tmp_path)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_load_that_fails_half_way_leaves_an_engine_that_only_loads(tmp_path: Path, zero: Any) -> None:
    engine = initialize(nn.Linear(3, 2), {"lr": 0.1}, zero=zero)

    def train_step() -> None:
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        assert engine.step()

    train_step()
    engine.save(tmp_path, wait=True)
    good = engine.state_dict()
    train_step()
    engine.save(tmp_path, wait=True)
    damaged = tmp_path / "step-00000002"
    [last] = damaged.glob("optim-exp_avg_sq-*")
    flip(last, last.stat().st_size - 1)
    with pytest.raises(ShardCorrupt):
        engine.load(damaged)
    calls: list[Callable[[], object]] = [
        train_step,
        engine.step,
        engine.state_dict,
        engine.zero_grad,
        lambda: engine.save(tmp_path, wait=True),
        lambda: engine.full_parameters().__enter__(),
    ]
    for call in calls:
        with pytest.raises(TkError, match=r"step-00000002 failed, so this engine holds values of two states"):
            call()
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        engine.load(tmp_path / "nowhere")
    with pytest.raises(TkError, match="values of two states"):
        engine.state_dict()
    engine.load(tmp_path / "step-00000001")
    assert torch.equal(engine.state_dict()["weight"], good["weight"])
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        engine.load(tmp_path / "nowhere")
    train_step()


def test_an_engine_that_is_gone_leaves_nothing_behind() -> None:
    """Its hooks sit on parameters, where the garbage collector does not look."""
    engine = initialize(nn.Linear(2, 2), OPTIMIZER, zero=1)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    weight = weakref.ref(engine.module.get_parameter("weight"))
    del engine
    gc.collect()
    assert weight() is None
