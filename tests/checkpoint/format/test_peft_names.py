"""PEFT's names of tensors, there and back."""

import pytest

from tk.checkpoint.format.peft_names import key_of, names_of
from tk.core.errors import ManifestError


def test_names_come_back_from_their_keys() -> None:
    names = ["h.0.q.lora_A.weight", "h.0.q.bias", "h.0.norm.bias", "lm_head.weight", "bias"]
    keys = [key_of(name, {"h.0.q"}) for name in names]
    assert keys[1:3] == ["base_model.model.h.0.q.base_layer.bias", "base_model.model.h.0.norm.bias"]
    assert list(names_of(keys, "here").values()) == names


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["base_model.model.a", "model.b"], "here holds 'model.b'; .* begin with 'base_model.model.'"),
        (["base_model.model."], "here holds 'base_model.model.'"),
        (["base_model.model.a.bias", "base_model.model.a.base_layer.bias"], "a.bias' and .*, which are both a.bias of"),
    ],
)
def test_other_keys_are_refused_by_name(keys: list[str], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        names_of(keys, "here")
