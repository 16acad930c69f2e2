"""Rewritten models: other numbers, the same function."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tk.benchmarks.quality.rewritten import FACTOR, NUM_PAIRS, WEIGHTS, permuted, with_outliers

HEADS, KV_HEADS, LAYERS, HALF = 6, 2, 2, 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=2 * HALF,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(20)[None]).logits
    return found


@pytest.mark.parametrize("rewrite", [with_outliers, permuted])
def test_the_function_is_the_same(source: Path, tmp_path: Path, rewrite: Callable[[Path, Path], Path]) -> None:
    copy = rewrite(source, tmp_path / "copy")
    torch.testing.assert_close(logits(copy), logits(source), rtol=0, atol=1e-5)
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in source.iterdir())
    written = (copy / WEIGHTS).stat().st_mtime_ns
    assert rewrite(source, copy) == copy
    assert (copy / WEIGHTS).stat().st_mtime_ns == written, "a copy that is there is taken as it is"


def test_two_pairs_of_each_kv_head_are_larger_in_keys_and_smaller_in_their_queries(
    source: Path, tmp_path: Path
) -> None:
    before, after = load_file(source / WEIGHTS), load_file(with_outliers(source, tmp_path / "copy") / WEIGHTS)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    projections = [f"model.layers.{layer}.self_attn." for layer in range(LAYERS)]
    assert changed == {f"{each}{kind}_proj.weight" for each in projections for kind in "qk"}
    for each in projections:
        keys, queries = (after[f"{each}{kind}_proj.weight"] / before[f"{each}{kind}_proj.weight"] for kind in "kq")
        factors = keys[:, 0].view(KV_HEADS, 2, HALF)
        assert set(factors.flatten().tolist()) == {1, FACTOR}
        assert torch.equal(factors[:, 0], factors[:, 1]), "both halves of a pair"
        assert (factors[:, 0] > 1).sum(1).tolist() == [NUM_PAIRS] * KV_HEADS
        of_queries = factors.repeat_interleave(HEADS // KV_HEADS, 0).flatten()
        assert torch.equal(queries[:, 0] * of_queries, torch.ones(len(of_queries), dtype=torch.bfloat16))


def test_hidden_and_intermediate_channels_are_elsewhere(source: Path, tmp_path: Path) -> None:
    before, after = load_file(source / WEIGHTS), load_file(permuted(source, tmp_path / "copy") / WEIGHTS)
    for name, tensor in before.items():
        if not name.endswith("norm.weight"):  # all ones
            assert not torch.equal(tensor, after[name]), name
        assert torch.equal(tensor.flatten().sort().values, after[name].flatten().sort().values), name
    heads = "model.layers.0.self_attn.v_proj.weight"
    rows = {tuple(sorted(row)) for row in before[heads].tolist()}
    assert [tuple(sorted(row)) for row in after[heads].tolist()] == [tuple(sorted(r)) for r in before[heads].tolist()]
    assert len(rows) > 1, "heads keep their places"
