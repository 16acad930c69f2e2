"""PEFT's adapter_config.json: read with PEFT's meaning, and refused by key where tk would build another adapter."""

from typing import Any

import pytest

from tk.core.errors import CheckpointError
from tk.model.lora.options import LoraOptions
from tk.model.lora.peft_config import from_peft, to_peft

PLAIN: dict[str, Any] = {"peft_type": "LORA", "target_modules": ["q_proj"]}


def test_options_come_back() -> None:
    options = LoraOptions(
        rank=3,
        alpha=5,
        dropout=0.1,
        targets=r".*\.q_proj",
        exclude=("0.q_proj",),
        rank_pattern={"q_proj": 2},
        alpha_pattern={"q_proj": 4},
        rslora=True,
        bias="lora_only",
        modules_to_save=("lm_head",),
    )
    assert from_peft(to_peft(options), "here") == options


def test_missing_keys_have_the_values_of_peft() -> None:
    from peft import LoraConfig

    found, theirs = from_peft(PLAIN, "here"), LoraConfig()
    assert (found.rank, found.alpha, found.dropout) == (theirs.r, theirs.lora_alpha, theirs.lora_dropout)
    assert (found.rslora, found.bias) == (theirs.use_rslora, theirs.bias)


def test_what_peft_writes_is_read() -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian")
    written = config.to_dict() | {"auto_mapping": None, "target_modules": ["q_proj"]}
    assert from_peft(written, "here") == LoraOptions(rank=4, alpha=8, targets=("q_proj",))


CHANGES = {
    "peft_type": "ADALORA",
    "task_type": "SEQ_CLS",
    "use_dora": True,
    "layers_to_transform": [-1],
    "layers_pattern": "layers",
    "target_parameters": ["experts.gate_up_proj"],
    "lora_bias": True,
    "layer_replication": [[0, 2]],
    "megatron_config": {"tp": 2},
    "trainable_token_indices": [3],
    "use_qalora": True,
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 2},
    "velora_config": {"scale": 1},
    "use_bdlora": {"nblocks": 2},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"buffer_size": 1},
    "ensure_weight_tying": True,
    "a_key_of_the_future": "yes",
    "init_lora_weights": "pissa_niter_4",
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_the_adapter_is_refused_by_name(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"^here: {key} = ") as error:
        from_peft(PLAIN | {key: CHANGES[key]}, "here")
    assert str(error.value).endswith(".")


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_a_key_that_says_nothing_is_ignored(value: object) -> None:
    assert from_peft(PLAIN | {"use_dora": value, "a_key_of_the_future": value}, "here").targets == ("q_proj",)


def test_every_key_of_peft_is_in_a_list_or_refused_unless_it_says_nothing() -> None:
    """A new key of peft whose usual value is not empty would have every adapter refused."""
    from peft import LoraConfig

    assert from_peft(LoraConfig(target_modules=["q_proj"]).to_dict() | {"target_modules": ["q_proj"]}, "here")


@pytest.mark.parametrize("start", ["pissa", "olora", "corda", "loftq", "lora_ga", "mica"])
def test_starts_that_change_the_base_are_refused_with_a_way_out(start: str) -> None:
    with pytest.raises(CheckpointError, match="path_initial_model_for_weight_conversion"):
        from_peft(PLAIN | {"init_lora_weights": start}, "here")


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base_alone_are_ignored(start: object) -> None:
    assert from_peft(PLAIN | {"init_lora_weights": start, "eva_config": {"rho": 2}}, "here")


@pytest.mark.parametrize(
    ("key", "value"), [("r", 0), ("r", "8"), ("lora_alpha", -1), ("target_modules", 3), ("bias", "x")]
)
def test_values_of_another_kind_are_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"^here: "):
        from_peft(PLAIN | {key: value}, "here")
