"""Modules and batches whose rows ranks cannot share: each is refused by name, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
)

from tk.core.errors import ConfigError, ParallelError
from tk.train import initialize
from tk.train.foreign.context_checks import batch_tensors, check_context

VOCAB = 64
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE: dict[str, Any] = {**SIZES, "vocab_size": VOCAB, "num_key_value_heads": 2}
ROWS = {"input_ids": torch.ones(2, 6, dtype=torch.long), "labels": torch.ones(2, 6, dtype=torch.long)}
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: nn.Linear(2, 2), "no model of transformers"),
        (lambda: _of(LlamaConfig(**SHAPE, attention_dropout=0.1)), "attention_dropout = 0.1"),
        (lambda: _of(Gemma2Config(**SHAPE, head_dim=8)), "attn_logit_softcapping"),
        (lambda: _of(MixtralConfig(**SHAPE, num_local_experts=4, output_router_logits=True)), "output_router_logits"),
        (lambda: _of(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)), "AttentionInterface"),
    ],
)
def test_other_modules_are_refused_by_name(make: Callable[[], nn.Module], named: str) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=named):
        initialize(model, cp=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(hasattr(parameter, "fqn") for parameter in model.parameters())


def _of(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (ROWS["input_ids"], "is a mapping"),
        ({"input_ids": ROWS["input_ids"]}, "needs input_ids and labels"),
        (ROWS | {"inputs_embeds": torch.zeros(2, 6, 32)}, "inputs_embeds, which cannot be dealt"),
        (ROWS | {"attention_mask": LEFT}, "pad rows on the right"),
        (ROWS | {"attention_mask": LEFT.flip(1)}, "the label -100"),
        (ROWS | {"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask is \[2, 1, 6, 6\]"),
        (ROWS | {"position_ids": torch.arange(5)[None]}, r"position_ids is \[1, 5\]"),
    ],
)
def test_batches_that_cannot_be_dealt_are_refused_by_name(batch: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        batch_tensors(batch)


def test_a_batch_may_have_padded_ends_and_positions_of_one_row() -> None:
    labels = ROWS["labels"].masked_fill(LEFT.flip(1) == 0, -100)
    batch = {"input_ids": ROWS["input_ids"], "labels": labels, "attention_mask": LEFT.flip(1), "use_cache": False}
    assert batch_tensors(batch | {"position_ids": torch.arange(6)[None]}).keys() == {
        "input_ids",
        "labels",
        "position_ids",
    }


def test_decoders_with_plain_attention_are_accepted() -> None:
    for config in (LlamaConfig(**SHAPE), MixtralConfig(**SHAPE, num_local_experts=4)):
        check_context(_of(config), 3, "auto")
        with pytest.raises(ParallelError, match=r"heads % cp = 4 % 3 = 1"):
            check_context(_of(config), 3, "ulysses")
