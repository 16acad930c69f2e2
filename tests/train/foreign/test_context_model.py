"""Models whose positions cannot be dealt to ranks are refused by name, and are not changed."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tk.core.errors import ConfigError, ParallelError
from tk.tests.train.foreign.rows_of_hub_models import make
from tk.train import initialize
from tk.train.context.modes import AttentionHeads
from tk.train.foreign.context_model import ModelAttention

_SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def _of(family: str, **sizes: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**_SMALL | sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def _with_conv() -> Any:
    model = make("Llama")
    model.model.layers[0].mlp.conv = nn.Conv1d(2, 2, 3)
    return model


def _of_linear_layers() -> Any:
    model = make("Qwen2")
    model.config.layer_types = ["linear_attention", "full_attention"]
    return model


def _with_other_loss() -> Any:
    model = make("Llama")
    model.loss_function = nn.functional.mse_loss
    return model


def _not_causal() -> Any:
    model = make("Llama")
    model.model.layers[1].self_attn.is_causal = False
    return model


_T5: dict[str, int] = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
_GEMMA: dict[str, int] = {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a module of torch": (lambda: nn.Linear(2, 2), "models of transformers"),
    "an encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)),
        "_supports_attention_backend is False|encoder-decoder",
    ),
    "a state-space model": (lambda: _of("Mamba", intermediate_size=24), "_supports_attention_backend|num_attention"),
    "linear layers": (_of_linear_layers, "linear_attention"),
    "capped scores": (lambda: _of("Gemma2", **_GEMMA), "attn_logit_softcapping"),
    "sinks": (
        lambda: _of("GptOss", **_GEMMA, num_local_experts=2, num_experts_per_tok=1, rope_parameters={
            "rope_type": "default", "rope_theta": 1e4}),
        "sinks",
    ),
    "dropout": (lambda: make("Llama", attention_dropout=0.1), "attention_dropout = 0.1"),
    "a loss of the router": (lambda: make("Mixtral", output_router_logits=True), "output_router_logits"),
    "frequencies of the row's length": (
        lambda: make("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "'dynamic'",
    ),
    "a convolution over positions": (_with_conv, "layers.0.mlp.conv"),
    "another loss": (_with_other_loss, "loss_function is mse_loss"),
    "no loss": (lambda: make("Llama").model, "takes no labels"),
    "a bidirectional layer": (_not_causal, "layers.1.self_attn is not causal"),
    "a classifier": (
        lambda: transformers.LlamaForSequenceClassification(make("Llama").config),
        "ForSequenceClassification",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_ranks_could_not_share_is_refused(name: str) -> None:
    build, error = REFUSED[name]
    model = build()
    before = {key: (type(value), value.clone()) for key, value in model.named_parameters()}
    with pytest.raises(ConfigError, match=error) as raised:
        initialize(model, cp=2)
    assert re.search("cp = 1|before you build", str(raised.value))
    for key, value in model.named_parameters():
        assert type(value) is before[key][0]
        assert torch.equal(value, before[key][1])


def test_heads_that_ulysses_cannot_split_and_ranks_that_cp_does_not_divide() -> None:
    with pytest.raises(ParallelError, match="4 % 3 = 1"):
        initialize(make("Llama"), cp=3, cp_mode="ulysses")
    with pytest.raises(ParallelError, match=r"cp=2.*1 ranks were started"):
        initialize(make("Llama"), cp=2)
    with pytest.raises(ConfigError, match="cp_mode"):
        initialize(make("Llama"), cp=2, cp_mode="ring")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_frequencies_of_the_rows_length_are_found_where_transformers_4_has_them(key: str) -> None:
    model = make("Llama")
    options = model.config.to_dict()
    del options["rope_parameters"]
    model.config = SimpleNamespace(**options | {"rope_scaling": {key: "longrope"}})
    with pytest.raises(ConfigError, match="'longrope'"):
        initialize(model, cp=2)


def test_windows_are_those_of_the_config() -> None:
    assert ModelAttention.of(make("Qwen2"), 2) == ModelAttention((None, 4), AttentionHeads(4, 2, 2))
    assert ModelAttention.of(make("Mistral"), 2).windows == (5, 5)
    assert ModelAttention.of(make("GPTNeoX"), 2) == ModelAttention((None, None), AttentionHeads(4, 4, 2))
