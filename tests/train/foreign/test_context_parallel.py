"""`initialize(cp=N)` on models of transformers: rows that ranks share train as in one process of plain PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
)

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import ConfigError, ParallelError
from tk.tests.rank_pool import RankPool
from tk.train import initialize

VOCAB, STEPS, ROWS = 64, 3, 2
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE: dict[str, Any] = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 64, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=5, head_dim=8),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, head_dim=8, sliding_window=None),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    ),
}
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0, "grad_clip": 0.5}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="sdpa")


def _batch(step: int, part: int, kind: str) -> dict[str, torch.Tensor]:
    """Returns the batch of one data-parallel part: whole rows of an odd length, documents, answers, or padded rows."""
    generator = torch.Generator().manual_seed(10 * step + part)
    length = 21
    ids = torch.randint(0, VOCAB, (ROWS, length), generator=generator)
    labels = ids.clone()
    if kind == "documents":
        places = torch.cat([torch.arange(each) for each in (4, 12, 5)]).expand(ROWS, -1)
        labels[places == 0] = -100
        return {"input_ids": ids, "labels": labels, "position_ids": places}
    if kind == "answers":  # of one rank all positions are questions
        labels[:, :-3] = -100
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[1, 14:] = 0
        return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}
    return {"input_ids": ids, "labels": labels}


def _gradients(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Returns the gradients of each parameter by name, as backward finds them: of this rank's share of the mean."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: found.setdefault(name, []).append(grad.detach().clone()))
    return found


def _expected(name: str, kind: str, dp: int) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Plain PyTorch: losses, first gradients, and weights after STEPS."""
    model = _model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        loss = sum(model(**_batch(step, part, kind), use_cache=False).loss for part in range(dp)) / dp
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, first, {name: value.detach() for name, value in model.state_dict().items()}


def train_shared(
    name: str, kind: str, cp: int, cp_mode: Any, out: str, zero: Any = 0, checkpointing: bool = False, folder: str = ""
) -> list[float]:
    """Returns the mean loss over data-parallel parts; `out` gets first gradients, and the last weights."""
    model = _model(name)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = initialize(model, OPTIMIZER, zero=zero, cp=cp, cp_mode=cp_mode, bucket_size=2000)
    found, losses = _gradients(model), []
    first: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        loss = engine(_batch(step, dist.get_rank() // cp, kind))
        assert model.config._attn_implementation == "sdpa", "a call of the module itself is one of transformers"
        engine.backward(loss)
        first = first or {f"gradient {key}": _sum(sum(grads)) for key, grads in found.items()}
        engine.step()
        losses.append(float(_sum(loss.detach().double()) / dist.get_world_size()))
    if folder:
        engine.save(folder, wait=True)
    weights = {f"weight {key}": value.clone() for key, value in engine.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(first | weights, out)
    return losses


def _sum(values: Any) -> torch.Tensor:
    total: torch.Tensor = values.clone()
    dist.all_reduce(total)
    return total


def _compare(losses: list[float], out: Path, expected: Any, gradients: bool = True) -> None:
    found, (true_losses, true_gradients, true_weights) = load_file(out), expected
    assert losses == pytest.approx(true_losses, rel=1e-5)
    whole = torch.cat([each.flatten() for each in true_gradients.values()]).norm()
    for name, true in true_gradients.items() if gradients else ():
        difference = (found[f"gradient {name}"] - true).norm() / (true.norm() + 0.01 * whole)
        assert difference < 1e-5, (name, float(difference))
    # All together: the bias of keys has almost no gradient, and AdamW makes large steps of its rounding.
    difference = sum((found[f"weight {name}"] - true).square().sum() for name, true in true_weights.items())
    assert difference <= 1e-10 * sum(true.square().sum() for true in true_weights.values())


ROWS_OF_MATRIX = [
    (name, kind, size, cp, mode)
    for name in MODELS
    for kind in ("whole", "documents", "answers", "padded")
    for size, cp in ((2, 2), (4, 2), (4, 4))
    for mode in ("gather", "ulysses")
]
CHOSEN = {
    ("llama", "documents", 4, 2, "gather"),
    ("mistral", "whole", 4, 4, "ulysses"),
    ("qwen2", "answers", 4, 4, "gather"),
    ("mixtral", "padded", 2, 2, "ulysses"),
}


@pytest.mark.parametrize(
    ("name", "kind", "size", "cp", "mode"),
    [row if row in CHOSEN else pytest.param(*row, marks=pytest.mark.matrix) for row in ROWS_OF_MATRIX],
)
def test_shared_rows_train_as_one_process(
    rank_pool: RankPool, tmp_path: Path, name: str, kind: str, size: int, cp: int, mode: str
) -> None:
    out = tmp_path / "out"
    losses = rank_pool.run(train_shared, size, name=name, kind=kind, cp=cp, cp_mode=mode, out=str(out))
    assert all(each == losses[0] for each in losses)
    _compare(losses[0], out, _expected(name, kind, size // cp))


@pytest.mark.parametrize("zero", [1, 3])
def test_every_stage_with_layers_that_are_computed_again(rank_pool: RankPool, zero: int, tmp_path: Path) -> None:
    """The checkpoint of cp 2 has the names that transformers has."""
    out, folder = tmp_path / "out", tmp_path / "run"
    arguments = {"name": "llama", "kind": "documents", "cp": 2, "cp_mode": "auto", "zero": zero}
    losses = rank_pool.run(train_shared, 4, checkpointing=True, out=str(out), folder=str(folder), **arguments)[0]
    expected = _expected("llama", "documents", 2)
    _compare(losses, out, expected, gradients=False)
    assert set(Checkpoint.open(folder).tensors) == set(expected[2])


def test_a_cp_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ParallelError, match="cp = 2 does not divide the 1 ranks"):
        initialize(_model("llama"), cp=2)


def refused_batches() -> list[str]:
    """Returns the errors of batches that cannot be shared; every rank gets each of them, and goes on."""
    engine = initialize(_model("llama"), OPTIMIZER, cp=2)
    good = _batch(0, 0, "whole")
    left = torch.ones_like(good["input_ids"])
    left[:, :3] = 0
    batches: list[Any] = [
        good["input_ids"],
        {"input_ids": good["input_ids"]},
        good | {"inputs_embeds": torch.zeros(2, 21, 32)},
        good | {"attention_mask": left},
        good | {"attention_mask": left.flip(1)},
        good | {"attention_mask": torch.ones(2, 1, 21, 21)},
        _batch(dist.get_rank(), 0, "whole"),
    ]
    errors = []
    for batch in batches:
        with pytest.raises(ConfigError) as caught:
            engine(batch)
        errors.append(str(caught.value))
    engine.backward(engine(good))
    assert engine.step()
    return errors


def test_batches_that_cannot_be_shared_are_refused_by_name(rank_pool: RankPool) -> None:
    for errors in rank_pool.run(refused_batches, 2):
        expected = ["mapping", "labels", "inputs_embeds", "right", "-100", "attention_mask is", "different batches"]
        for error, named in zip(errors, expected, strict=True):
            assert named in error, error
