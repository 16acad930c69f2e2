"""A run with frozen parameters: they stay bit-equal and have no slots, the rest is trained as with constants."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tk.checkpoint.read.reader import Checkpoint
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.frozen_steps import OPTIMIZER, small_llama, steps_of_engine, steps_of_torch
from tk.tests.train.run_training import run_training
from tk.train import initialize, on_meta

FREEZE = ["model.embed_tokens", "model.layers.0"]
LAYOUTS = ({"tp": 2, "dp": 1}, {"tp": 1, "dp": 2}, {"tp": 1, "pp": 2, "dp": 1})


def _is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "model.layers.0."))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.matrix), 3])
def test_frozen_parameters_stay_as_they_are(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, stage: int
) -> None:
    options = {"optimizer": {"grad_clip": 0.0}, "checkpoint": {"every": 1}}
    free = run_training(configure("free", train={"steps": 1}, **options))
    frozen = run_training(configure("frozen", train={"steps": 3, "freeze": FREEZE}, **options))
    assert frozen["loss"][0] == free["loss"][0]
    begun, first, last = (
        Checkpoint.open(tmp_path / run / f"step-{step:08d}")
        for run, step in (("free", 1), ("frozen", 1), ("frozen", 3))
    )
    for name, tensor in last.tensors.items():
        moved = not torch.equal(first.read(name).torch(), last.read(name).torch())
        assert moved != _is_frozen(name), name
        assert ("exp_avg" in tensor.slots) != _is_frozen(name), name
        if not _is_frozen(name):  # gradients do not depend on the other trained parameters
            assert torch.equal(first.read(name, slot="exp_avg").torch(), begun.read(name, slot="exp_avg").torch())
    for number, parallel in enumerate(LAYOUTS):
        config = configure(
            f"layout-{number}",
            train={"steps": 3, "freeze": FREEZE},
            parallel=parallel,
            zero={"stage": stage},
            **options,
        )
        for result in rank_pool.run(run_training, 2, config=config):
            np.testing.assert_allclose(result["loss"], frozen["loss"], rtol=1e-5)
        mine = Checkpoint.open(tmp_path / f"layout-{number}")
        for name in filter(_is_frozen, mine.tensors):
            assert torch.equal(mine.read(name).torch(), last.read(name).torch()), name


LAST = ["model.layers.1", "model.norm", "lm_head"]
EXPERTS = {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SHARDED: dict[str, dict[str, Any]] = {  # layouts of ZeRO stage 3
    "hybrid shards": {"parallel": {"dp": 4}, "zero": {"shard_size": 2}, "freeze": LAST},
    "tp and dp": {"parallel": {"tp": 2, "dp": 2}, "freeze": LAST},
    "zb-h1": {"parallel": {"pp": 2, "dp": 2, "schedule": "zb-h1"}, "freeze": FREEZE},
    "a last stage without trained ones": {"parallel": {"pp": 2, "dp": 2}, "freeze": LAST},
    "recomputed": {"parallel": {"dp": 2}, "recompute": {"mode": "full"}, "freeze": LAST},
    "parameters on the host": {
        "parallel": {"dp": 2},
        "offload": {"optimizer": "cpu", "parameters": "cpu"},
        "precision": {"params": "fp32"},
        "freeze": LAST,
    },
    "parameters on disk": {
        "parallel": {"dp": 2},
        "offload": dict.fromkeys(("optimizer", "gradients", "parameters"), "disk"),
        "freeze": ["model.layers"],
    },
    "cp": {"parallel": {"cp": 2, "dp": 2}, "freeze": ["model.layers.0"]},
    "experts": {"model": EXPERTS, "parallel": {"dp": 4, "ep": 2}, "freeze": ["*.experts.*"]},
    "all but experts": {
        "model": EXPERTS,
        "parallel": {"tp": 2, "dp": 2, "ep": 2},
        "freeze": ["*.self_attn.*", "*norm*", "model.embed_tokens", "lm_head", "*.gate.*"],
    },
    "a tied head on two ranks": {
        "model": {"tie_word_embeddings": True},
        "parallel": {"pp": 2, "dp": 2},
        "freeze": ["model.embed_tokens"],
    },
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.matrix) for name in SHARDED if name != "zb-h1"), "zb-h1"]
)
def test_sharded_frozen_parameters_train_as_in_one_process_and_continue_elsewhere(
    rank_pool: RankPool, configure: Configure, tmp_path: Path, name: str
) -> None:
    sections = dict(SHARDED[name])
    train = {"steps": 4, "freeze": sections.pop("freeze"), "global_batch_size": 8}
    alike = {"train": train, "model": sections.pop("model", {}), "checkpoint": {"every": 2}}
    sections["zero"] = {"stage": 3, **sections.get("zero", {})}
    world = math.prod(sections["parallel"].get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))

    def run_split(run: str, resume: str = "auto") -> list[float]:
        config = configure(run, **alike, **sections)
        losses: list[float] = rank_pool.run(run_training, world, config=config, resume=resume)[-1]["loss"]
        return losses

    expected = run_training(configure("one", **alike))["loss"]
    np.testing.assert_allclose(run_split("split"), expected, rtol=1e-5)
    whole, split = (Checkpoint.open(tmp_path / run) for run in ("one", "split"))
    assert split.verify().ok
    assert {key: set(each.slots) for key, each in split.tensors.items()} == {
        key: set(each.slots) for key, each in whole.tensors.items()
    }
    frozen = [key for key, each in split.tensors.items() if "exp_avg" not in each.slots]
    assert frozen
    for key in frozen:
        assert torch.equal(split.read(key).torch(), whole.read(key).torch()), key
    from_one, from_split = (str(tmp_path / run / "step-00000002") for run in ("one", "split"))
    np.testing.assert_allclose(run_split("one to split", from_one), expected[2:], rtol=1e-5)
    continued = run_training(configure("split to one", **alike), resume=from_split)["loss"]
    np.testing.assert_allclose(continued, expected[2:], rtol=1e-5)


TRAINED = {  # by the name of a case, the parts of names of what is trained
    "in every block": ("up_proj",),  # whose gradients arrive before the block's backward has ended
    "the first blocks": ("embed_tokens", "layers.0."),
    "the last block": ("layers.2.", "lm_head"),
    "a block in the middle": ("layers.1.",),
}


def adapted_llama(case: str) -> LlamaForCausalLM:
    """Returns a model of `transformers` in which only the parameters of a case are trained."""
    model = small_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in TRAINED[case]))
    return model


def train_adapted(
    case: str, zero: Any, checkpointing: str, save: str, load: str = "", weights: str | None = None
) -> dict[str, Any]:
    """Returns what `steps_of_engine` does.

    Args:
        weights: a folder of the first values, or "" to make them parameter by parameter; None = build the model whole.
    """
    with nullcontext() if weights is None else on_meta():
        model = adapted_llama(case)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    engine = initialize(model, OPTIMIZER, zero=zero, bucket_size=1500, weights=weights or None)
    if load:
        engine.load(load)
    found = steps_of_engine(engine)
    engine.save(save, wait=True)
    return found


@pytest.mark.parametrize(
    ("case", "zero", "checkpointing"),
    [
        ("in every block", 3, "not reentrant"),
        ("the first blocks", 3, ""),
        *(
            pytest.param(case, zero, checkpointing, marks=pytest.mark.matrix)
            for case in TRAINED
            for zero in (2, 3)
            for checkpointing in ("", "not reentrant", "reentrant")
            if (case, zero, checkpointing) not in (("in every block", 3, "not reentrant"), ("the first blocks", 3, ""))
        ),
    ],
)
def test_a_module_with_frozen_parameters_trains_as_torch_trains_it(
    rank_pool: RankPool, tmp_path: Path, case: str, zero: int, checkpointing: str
) -> None:
    plain = adapted_llama(case)
    losses = steps_of_torch(plain)
    options = {"case": case, "zero": zero, "checkpointing": checkpointing}
    results = rank_pool.run(train_adapted, 2, **options, save=str(tmp_path / "run"))
    for result in results:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        assert zero < 3 or max(result["held"]) < 100, "between passes a rank has its part alone"
    saved, first = Checkpoint.open(tmp_path / "run"), adapted_llama(case).state_dict()
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            np.testing.assert_allclose(saved.read(name).numpy(), parameter.detach().numpy(), rtol=2e-4, atol=2e-6)
        else:
            assert torch.equal(saved.read(name).torch(), first[name]), name
            assert list(saved.tensors[name].slots) == ["weight"], name
    adapted_llama(case).save_pretrained(tmp_path / "first")
    for weights in ("", str(tmp_path / "first")):
        absent = rank_pool.run(
            train_adapted, 2, **options, save=str(tmp_path / f"absent{bool(weights)}"), weights=weights
        )
        assert absent[0]["losses"] == results[0]["losses"]
        assert zero < 3 or max(absent[0]["held"]) < 100
    again = rank_pool.run(train_adapted, 2, **options, save=str(tmp_path / "again"), load=str(tmp_path / "run"))
    assert again[0]["losses"] == []
    loaded = Checkpoint.open(tmp_path / "again")
    for name in saved.tensors:
        assert torch.equal(loaded.read(name).torch(), saved.read(name).torch()), name
