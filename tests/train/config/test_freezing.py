"""`[train] freeze`: the tensors that patterns select, and patterns that are refused."""

from collections.abc import Sequence

import pytest

from tk.core.errors import ConfigError
from tk.core.tensors import TensorSpec
from tk.model.config import ModelConfig
from tk.model.registry import tensor_table
from tk.train.config.freezing import frozen_tensors


def table(architecture: str = "llama", tied: bool = False) -> tuple[TensorSpec, ...]:
    return tensor_table(
        ModelConfig(architecture=architecture, vocab_size=100, num_hidden_layers=12, tie_word_embeddings=tied)
    )


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], []),
        (["model.embed_tokens"], ["model.embed_tokens.weight"]),
        (["model.embed_tokens.weight", "lm_head."], ["model.embed_tokens.weight", "lm_head.weight"]),
        (["*.norm.weight"], ["model.norm.weight"]),
        (["model.layers.1.mlp.down*"], ["model.layers.1.mlp.down_proj.weight"]),
        (["model.layers.1.mlp.gate_up_proj"], [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]),
    ],
)
def test_patterns(patterns: Sequence[str], expected: list[str]) -> None:
    assert frozen_tensors(table(), patterns) == set(expected)


def test_a_layer_number_matches_that_layer_alone() -> None:
    frozen = frozen_tensors(table(), ["model.layers.1"])
    assert len(frozen) == 9
    assert all(name.startswith("model.layers.1.") for name in frozen)
    assert len(frozen_tensors(table(), ["model.layers.*"])) == 12 * 9


def test_names_of_the_file_and_of_the_parameter_both_match() -> None:
    stored = frozen_tensors(table("gpt2"), ["transformer.wte", "transformer.h.0"])
    assert stored == frozen_tensors(table("gpt2"), ["model.embed_tokens", "model.layers.0"])
    assert "transformer.wte.weight" in stored


def test_a_tied_head_is_frozen_with_its_embedding() -> None:
    embedding = {"model.embed_tokens.weight"}
    assert frozen_tensors(table(tied=True), ["lm_head"]) == embedding
    assert frozen_tensors(table(tied=True), ["model.embed_tokens"]) == embedding


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (
            ["model.embed_token"],
            r"'model\.embed_token' matches no parameter; .* 'model\.embed_tokens\.weight'",
        ),
        (["model.layers.1", "model.layers.12"], r"'model\.layers\.12' matches no parameter"),
        (["*.q_proj.weight"], r"q_proj\.weight and .*k_proj\.weight are parts of one parameter .*qkv_proj\.weight\)"),
        (["*"], "leaves no parameter to train"),
    ],
)
def test_a_pattern_that_cannot_be_frozen_is_refused(patterns: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        frozen_tensors(table(), patterns)
