"""Logits and gradients of every factor: those of `peft`, and with experts of `transformers` with merged weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tk.model.decoder import Decoder
from tk.model.lora.options import LoraOptions
from tk.model.lora.table import is_factor
from tk.tests.model.architectures import ENTRIES, LENGTH, VOCAB
from tk.tests.model.lora.peft_models import adapted_decoder, adapted_spec, parameters_of, wrapped
from tk.train.engine.attention import causal_attention

MIXTURES = ("qwen2_moe", "mixtral", "qwen3_moe", "glm4_moe", "glm4_moe ungrouped")
DENSE = [name for name in ENTRIES if name not in MIXTURES]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
PATTERNS = {"rank_pattern": {r".*\.1\..*": 3}, "alpha_pattern": {r".*\.[02]\..*": 2.0}}
OPTIONS: dict[str, dict[str, Any]] = {
    "all-linear": {"targets": "all-linear"},
    "attention": {"targets": ATTENTION, "bias": "lora_only"},
    "mlp": {"targets": ["gate_proj", "up_proj", "down_proj"], "rslora": True},
    "one of qkv": {"targets": ["k_proj", "up_proj"], **PATTERNS},
    "head": {"targets": ATTENTION, "modules_to_save": ["lm_head"], "rslora": True, **PATTERNS},
    "norms": {"targets": "all-linear", "modules_to_save": ["norm"], "bias": "all"},
}
OF_GPT2: dict[str, dict[str, Any]] = {
    "attention": {"targets": ["c_attn", "attn.c_proj"], "bias": "lora_only"},
    "mlp": {"targets": ["c_fc", "mlp.c_proj"], "rslora": True},
    "one of qkv": {"targets": ["c_attn"], **PATTERNS},
    "head": {"targets": ["c_attn"], "modules_to_save": ["lm_head"], "rslora": True, **PATTERNS},
    "norms": {"targets": "all-linear", "modules_to_save": ["ln_1", "ln_f"], "bias": "all"},
}
FAST = {("llama3", "all-linear"), ("gpt2", "norms"), ("qwen2", "one of qkv"), ("gpt2 untied", "head")}
CASES = [
    pytest.param(name, key, marks=() if (name, key) in FAST else pytest.mark.matrix)
    for name in ENTRIES
    for key in OPTIONS
    if (name in DENSE or key in ("attention", "head"))
    and not (key == "head" and name in ("qwen2", "gpt2", "qwen3_moe"))
]


def options_of(name: str, key: str) -> LoraOptions:
    chosen = OPTIONS[key] | (OF_GPT2.get(key, {}) if name.startswith("gpt2") else {})
    return LoraOptions(rank=4, alpha=6, **chosen)


def gradients_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Returns the gradient of every trained tensor of a decoder on one process."""
    found = {}
    for local in decoder.local_params():
        gradient = decoder.get_parameter(local.name).grad
        assert (gradient is not None) == local.trainable, local.name
        for piece in local.pieces if local.trainable else ():
            assert gradient is not None
            flat = gradient.view(-1)[piece.start : piece.start + piece.box.size]
            found[piece.tensor.name] = flat.view(piece.tensor.shape)
    return found


def backward(decoder: Decoder, reference: nn.Module) -> None:
    """Compares logits, and runs backward of the same loss in both."""
    tokens_BL = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions_BL = torch.arange(LENGTH).expand_as(tokens_BL)
    expected = reference(tokens_BL).logits
    logits = decoder.logits(decoder(tokens_BL, positions_BL, causal_attention))[..., :VOCAB]
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    for values in (logits, expected):
        values.square().mean().backward()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compares gradients by name, each relative to itself and a little to all of them."""
    assert found.keys() == expected.keys()
    whole_norm = torch.stack([each.norm() for each in expected.values()]).norm()
    for name, gradient in found.items():
        wanted = expected[name]
        off = (gradient - wanted).norm() / (wanted.norm() + 1e-2 * whole_norm)
        assert off < 1e-5, f"{name}: {off}"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "key"), CASES)
def test_a_decoder_with_adapters_is_that_of_peft(tmp_path: Path, name: str, key: str) -> None:
    options = options_of(name, key)
    reference = wrapped(ENTRIES[name].make(tmp_path), options)
    theirs = parameters_of(reference)
    decoder = adapted_decoder(tmp_path, options, {key: each.detach() for key, each in theirs.items()})
    backward(decoder, reference)
    trained = {key: each.grad for key, each in theirs.items() if each.requires_grad and each.grad is not None}
    assert_equal(gradients_of(decoder), trained)


def weight_of(model: PreTrainedModel, name: str) -> tuple[nn.Parameter, tuple[int | slice, ...]]:
    """Returns the parameter of `transformers` that has a weight of tk's name, and the place of the weight in it."""
    expert = re.fullmatch(r"(model\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
    if expert is None:
        return model.get_parameter(name), ()
    block, number, leaf = f"{expert[1]}.mlp.experts", int(expert[2]), expert[3]
    if leaf in ("down_proj", "w2"):
        return model.get_parameter(f"{block}.down_proj"), (number,)
    fused = model.get_parameter(f"{block}.gate_up_proj")
    half = fused.shape[1] // 2
    return fused, (number, slice(0, half) if leaf in ("gate_proj", "w1") else slice(half, None))


MERGED: dict[str, dict[str, Any]] = {
    "all-linear": {"targets": "all-linear"},
    "patterns": {"targets": r".*experts.*", "rslora": True, "rank_pattern": {r"down_proj|w2|layers\.1\..*": 3}},
    "a part": {"targets": r".*\.(up_proj|w3|o_proj)"},
}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param(name, key, marks=() if (name, key) == ("qwen2_moe", "all-linear") else pytest.mark.matrix)
        for name in MIXTURES
        for key in MERGED
    ],
)
def test_adapters_of_experts_are_a_change_of_their_weights(tmp_path: Path, name: str, key: str) -> None:
    """Compares with fp64: of fp32, merged weights and the order of sums alone are off by up to 9e-6.

    The factors of qwen2_moe are drawn with a seed of which that is a measure. With seed 1 a change of the embedding by
    half a unit in the last place moves gradients of expert 5 by 5e-6; fp32 is off by 9e-6 there in `transformers`, by
    2e-5 here. With seeds 2 to 5 both are off by 5e-6 to 8e-6.
    """
    options = {"rank": 4, "alpha": 6, **MERGED[key]}
    model = ENTRIES[name].make(tmp_path).double()
    model.set_experts_implementation("eager")  # the others have no kernels for fp64
    spec = adapted_spec(name, **options)
    torch.manual_seed(2)
    factors = {each.name: 0.1 * torch.randn(each.shape) for each in spec.table if is_factor(each)}
    pairs = {
        weight: [factors[f"{weight.removesuffix('.weight')}.lora_{factor}.weight"] for factor in "AB"]
        for weight in spec.adapters
    }
    with torch.no_grad():
        for weight, (a, b) in pairs.items():
            parameter, place = weight_of(model, weight)
            parameter[place] += spec.adapters[weight].scale * b.double() @ a.double()
    decoder = adapted_decoder(tmp_path, LoraOptions(**options), factors)
    backward(decoder, model)
    expected: dict[str, torch.Tensor] = {}
    for weight, (a, b) in pairs.items():
        parameter, place = weight_of(model, weight)
        assert parameter.grad is not None
        scaled = spec.adapters[weight].scale * parameter.grad[place]
        module = weight.removesuffix(".weight")
        expected |= {
            f"{module}.lora_A.weight": b.t().double() @ scaled,
            f"{module}.lora_B.weight": scaled @ a.t().double(),
        }
    assert [weight for weight in pairs if ".experts." in weight]
    assert_equal(gradients_of(decoder), expected)
