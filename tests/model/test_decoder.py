"""Pipeline stages of a decoder, one after another in one process, against the whole decoder: the same bits."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.core.layout import Layout, Stage, stages
from tk.model.balance import RouterBalance
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.loading import load_weights
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.parallel.weight_grads import WeightGradQueue, run_deferred
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import backward, build, config_of, gradients, loss_of, tokens
from tk.tests.rank_pool import RankPool
from tk.train.engine.attention import causal_attention


def _run(parts: Sequence[Decoder]) -> tuple[torch.Tensor, float]:
    """Runs forward and backward, with hidden states and their gradients passed on as between ranks.

    Returns the logits and the load-balancing loss of all stages.
    """
    balances = [RouterBalance(0.5) for _ in parts]
    states, positions, _ = tokens()
    ends: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part, balance in zip(parts, balances, strict=True):
        entering = states.detach().requires_grad_(states.is_floating_point())
        states = part(entering, positions, causal_attention, balance)
        ends.append((entering, states))
    loss_of(parts[-1], states).backward()
    for (_, leaving), (entering, _) in zip(ends[-2::-1], ends[:0:-1], strict=True):
        leaving.backward(entering.grad)
    return parts[-1].logits(states).detach(), sum(float(balance.total()) for balance in balances)


def _compare(name: str, tied: bool, tp: Group) -> None:
    """Returns stages of 1, 1 and 2 layers."""
    config = config_of(name, tie_word_embeddings=tied, num_hidden_layers=4)
    whole = build(config, tp)
    cuts = [stage for (stage,) in stages(whole.spec.table, Layout(pp=3))]
    assert [len(cut.layers) for cut in cuts] == [1, 1, 2]
    parts = [build(config, tp, stage=cut) for cut in cuts]
    (logits, balance), (expected_logits, expected_balance) = _run(parts), _run([whole])
    assert torch.equal(logits, expected_logits)
    assert balance == pytest.approx(expected_balance)
    found = [gradients(part) for part in parts]
    expected = gradients(whole)
    heads = {key: value for key, value in found[-1].items() if tied and key[0] == "lm_head.weight"}
    for (_, box), gradient in heads.items():
        key = next(key for key in found[0] if key[1] == box)  # embeddings come first
        torch.testing.assert_close(found[0].pop(key) + gradient, expected.pop(key), rtol=1e-5, atol=1e-7)
    together = {key: value for part in found for key, value in part.items() if key not in heads}
    assert len(heads) == tied
    assert together.keys() == expected.keys()
    for key, value in together.items():
        assert torch.equal(value, expected[key]), key


def compare_at_tp(names: list[str]) -> None:
    tp = Mesh.build(Layout(tp=torch.distributed.get_world_size()), 2).tp
    for name in names:
        for tied in (False, True):
            _compare(name, tied, tp)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ENTRIES)
def test_stages_equal_the_whole(name: str, tied: bool) -> None:
    _compare(name, tied, ALONE)


def test_stages_equal_the_whole_at_tp(rank_pool: RankPool) -> None:
    rank_pool.run(compare_at_tp, 2, names=list(ENTRIES))


def test_a_stage_has_its_own_parameters_under_their_global_names() -> None:
    config = config_of("llama3", tie_word_embeddings=True, num_hidden_layers=4)
    middle = build(config, ALONE, stage=Stage(range(1, 3), first=False, last=False))
    names = {name for name, _ in middle.named_parameters()}
    assert {".".join(name.split(".")[:3]) for name in names} == {"model.layers.1", "model.layers.2"}
    assert names == {local.name for local in middle.local_params()}


def test_a_tied_head_of_its_own_stage_starts_from_the_embedding(tmp_path: Path) -> None:
    """A stage's weights are those of the whole model, both drawn and loaded."""
    ENTRIES["qwen2"].make(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    first = build(config, ALONE, stage=Stage(range(1), last=False))
    last = build(config, ALONE, stage=Stage(range(1, 3), first=False))
    drawn = last.get_parameter("lm_head.weight").clone()
    assert torch.equal(drawn, first.get_parameter("model.embed_tokens.weight"))
    for stage in (first, last):
        load_weights(stage, Checkpoint.open(tmp_path))
    assert torch.equal(last.get_parameter("lm_head.weight"), first.get_parameter("model.embed_tokens.weight"))
    assert not torch.equal(last.get_parameter("lm_head.weight"), drawn)


@pytest.mark.parametrize("name", ["llama3", "mixtral", "gpt2"])
def test_deferred_weight_gradients_are_the_same(name: str) -> None:
    """B and W of a zero-bubble schedule together must equal one backward pass."""
    queue = WeightGradQueue()
    at_once, deferred = (build(config_of(name), ALONE, weight_grads=queue) for _ in range(2))
    backward(at_once)
    queue.enabled = True
    backward(deferred)
    missing = {name for name, parameter in deferred.named_parameters() if parameter.grad is None}
    assert missing >= {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.2.self_attn.o_proj.weight"}
    run_deferred(queue.take())
    expected = gradients(at_once)
    for key, value in gradients(deferred).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-7, msg=str(key))
