"""The modules with an adapter, their ranks and scales, and what is trained of the base: as in `peft`."""

from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.model.lora.options import LoraOptions
from tk.model.lora.targets import adapters_of, module_of
from tk.model.registry import decoder_spec
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import config_of
from tk.tests.model.lora.peft_models import adapted_spec, parameters_of, wrapped

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"targets": "all-linear"}),
    ("llama3", {"targets": ["q_proj", "mlp.down_proj", "model.layers.1.self_attn.o_proj"]}),
    ("llama3", {"targets": r".*layers\.[02]\..*(q|o)_proj"}),
    ("llama3", {"targets": "all-linear", "exclude": ["down_proj", "layers.0.self_attn.k_proj"]}),
    ("llama3", {"targets": ["q_proj", "v_proj"], "exclude": r".*\.2\..*"}),
    ("llama3", {"rank_pattern": {"q_proj": 2, r"layers\.1\..*": 3}, "alpha_pattern": {r".*\.2\..*": 5.0}}),
    ("llama3", {"rank_pattern": {r"^model\.layers\.0\.mlp\.up_proj": 7}, "rslora": True, "rank": 9}),
    ("llama3", {"targets": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    ("llama3", {"targets": ["q_proj"], "modules_to_save": ["layers.1.mlp", "embed_tokens"]}),
    ("qwen2", {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "bias": "lora_only"}),
    ("qwen2", {"targets": ["o_proj"], "bias": "all"}),
    ("gpt2", {"targets": "all-linear"}),
    ("gpt2", {"targets": ["c_attn", "mlp.c_proj"], "bias": "lora_only"}),
    ("gpt2 untied", {"targets": ["c_fc"], "modules_to_save": ["wpe", "ln_f", "lm_head"]}),
    ("qwen2_moe", {"targets": ["q_proj", "shared_expert.up_proj", "layers.1.mlp.down_proj"]}),
    ("glm4_moe", {"targets": ["v_proj", "o_proj"], "bias": "all"}),
]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_modules_ranks_and_scales_are_those_of_peft(name: str, options: dict[str, Any]) -> None:
    from peft.tuners.lora import LoraLayer

    entry = ENTRIES[name]
    model = wrapped(entry.model(entry.make_config()), LoraOptions(**options))
    layers = {
        module.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for module, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    spec = adapted_spec(name, **options)
    found = {module_of(tensor): (adapter.rank, adapter.scale) for tensor, adapter in spec.adapters.items()}
    assert found == layers
    trained = {key: tuple(each.shape) for key, each in parameters_of(model).items() if each.requires_grad}
    assert {each.name: each.shape for each in spec.table if each.trainable and not each.alias} == trained
    assert not [each.name for each in spec.table if each.trainable and each.alias]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("llama3", {"targets": ["q_porj"]}, "targets: 'q_porj' selects no module; the nearest is 'q_proj'"),
        ("llama3", {"targets": ["q_proj", "proj"]}, "targets: 'proj' selects no module"),
        ("llama3", {"targets": r"q_proj"}, "targets: 'q_proj' selects no module"),
        ("mixtral", {"targets": ["gate"]}, "block_sparse_moe.gate has no adapter in tk"),
        ("llama3", {"targets": ["embed_tokens"]}, "model.embed_tokens has no adapter in tk.*modules_to_save"),
        ("llama3", {"targets": ["q_proj", "lm_head"]}, "lm_head has no adapter in tk"),
        ("llama3", {"targets": ["norm"]}, "norm has no adapter in tk"),
        ("llama3", {"exclude": ["q_porj"]}, "exclude: 'q_porj' selects no module"),
        ("llama3", {"targets": ["q_proj"], "exclude": ["q_proj"]}, "leave no module of targets"),
        ("llama3", {"targets": ["q_proj"], "rank_pattern": {"k_proj": 2}}, "rank_pattern: 'k_proj' matches no module"),
        ("llama3", {"targets": ["q_proj"], "alpha_pattern": {"proj": 2.0}}, "alpha_pattern: 'proj' matches no module"),
        (
            "llama3",
            {"modules_to_save": ["lm_haed"]},
            "modules_to_save: 'lm_haed' names no module; the nearest is 'lm_h",
        ),
    ],
)
def test_options_that_select_nothing_are_refused_by_name(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"\[lora\] .*" + said):
        adapters_of(decoder_spec(config_of(name)).table, LoraOptions(**options))


def test_a_saved_module_has_no_adapter() -> None:
    spec = adapted_spec("llama3", modules_to_save=["down_proj"])
    assert not [name for name in spec.adapters if "down_proj" in name]
    saved = {tensor.name for tensor in spec.table if tensor.trainable and "down_proj" in tensor.name}
    assert saved == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)}


def test_scales_are_alpha_by_rank_or_its_root() -> None:
    table = decoder_spec(config_of("llama3")).table
    (plain,) = set(adapters_of(table, LoraOptions(rank=4, alpha=6, dropout=0.5)).values())
    (rooted,) = set(adapters_of(table, LoraOptions(rank=4, alpha=6, rslora=True)).values())
    assert (plain.rank, plain.scale, plain.dropout) == (4, 1.5, 0.5)
    assert (rooted.rank, rooted.scale, rooted.dropout) == (4, 3.0, 0.0)
