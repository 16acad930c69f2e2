"""The losses of routers against `transformers`' function and a plain formula, in value and in every gradient."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tk.checkpoint import Checkpoint
from tk.core.layout import Layout
from tk.model.balance import RouterBalance, balancing_loss, routing_checksum
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.experts.router import Router
from tk.model.loading import load_weights
from tk.parallel.collectives import all_reduce
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE, Mesh, join_world
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import (
    BATCH,
    CPU,
    LENGTH,
    backward,
    build,
    compare_with_one_process,
    config_of,
    gradients,
    loss_of,
    tokens,
)
from tk.tests.rank_pool import RankPool
from tk.train.engine.attention import causal_attention

SPARSE = ["mixtral", "qwen2_moe", "qwen3_moe"]


def compare_at_tp() -> None:
    mesh = Mesh.build(Layout(tp=torch.distributed.get_world_size()), num_kv_heads=2)
    for name in SPARSE:
        for sequence_parallel in (False, True):
            compare_with_one_process(mesh, name, balance_weight=0.5, sequence_parallel=sequence_parallel)


def compare_at_cp() -> None:
    """Deals the tokens of sequences in turn; a sequence has fewer that count on rank 0 than on rank 1."""
    group = join_world()
    generator = torch.Generator().manual_seed(3)
    probabilities = (2 * torch.randn(3, 20, 6, generator=generator)).softmax(dim=-1)
    counted = torch.ones(3, 20, dtype=torch.bool)
    counted[0, 5:] = counted[1] = False
    counted[2, ::2] = False
    leaf = probabilities.clone().requires_grad_()
    chosen = probabilities.topk(2, dim=-1).indices
    expected = balancing_loss(leaf, chosen, counted)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    mine = torch.arange(group.rank, 20, group.size)
    part = probabilities[:, mine].requires_grad_()
    balance = RouterBalance(0.5, counted[:, mine], True, mine.expand(3, -1), group)
    balance.z_weight = 1.0
    loss = balancing_loss(part, chosen[:, mine], balance.counted_BL, group)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, part)[0], expected_grad[:, mine])
    balance.on_routing(4, chosen[:, mine], 6)
    counts_LE = torch.zeros(5, 6, dtype=torch.float64)
    balance.add_counts(counts_LE)
    assert all_reduce(counts_LE, group)[4].long().equal(chosen[counted].flatten().bincount(minlength=6))
    balance.attach(4, part, loss, 1, 1)
    balance.attach_z(4, part, probabilities[:, mine, 0], 1, 1)
    totals = [float(balance.routing()), float(balance.total()), float(balance.z_total())]
    sums = all_reduce(torch.tensor(totals, dtype=torch.float64), group)
    assert sums[0] == routing_checksum(4, chosen, counted)
    assert sums[1] == pytest.approx(float(expected), rel=1e-6), "no multiple of it"
    assert sums[2] == pytest.approx(float(probabilities[..., 0][counted].square().sum()), rel=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_of_a_sequence_is_the_one_of_transformers(padded: bool) -> None:
    logits = 2 * torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0))
    counted = torch.ones(3, 20, dtype=torch.bool)
    if padded:
        counted[0, 15:] = counted[1] = False
    probabilities = logits.softmax(dim=-1)
    chosen = probabilities.topk(2, dim=-1).indices
    expected = sum(
        load_balancing_loss_func((row,), 6, 2, attention_mask=mask.long() if padded else None)
        for row, mask in zip(logits, counted, strict=True)
        if mask.any()
    )
    mine = balancing_loss(probabilities, chosen, counted if padded else None)
    torch.testing.assert_close(mine, expected)
    assert mine > 2 * (2 if padded else 3) * 1.02, "balanced, each sequence has loss 2"


def test_the_shares_of_a_long_sequence_do_not_drift() -> None:
    """All of 100,003 tokens go to expert 0 of 2: its share must be exactly 1, though fp32 cannot hold 1 / 100,003."""
    length = 100_003
    probabilities = torch.tensor([1.0, 0.0]).expand(1, length, 2)
    chosen = torch.zeros(1, length, 1, dtype=torch.int64)
    assert float(balancing_loss(probabilities, chosen)) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("name", SPARSE)
def test_gradients_equal_transformers(tmp_path: Path, name: str) -> None:
    coefficient = 0.7
    model = ENTRIES[name].make(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    decoder = Decoder(config, LayerContext(ALONE, torch.float32, CPU))
    load_weights(decoder, Checkpoint.open(tmp_path))
    balance = RouterBalance(coefficient / BATCH)
    backward(decoder, balance)

    inputs, _, targets = tokens()
    output = model(inputs, output_router_logits=True, use_cache=False)
    routers = [layer for layer in output.router_logits if layer is not None]
    sequences = [rows for layer in routers for rows in layer.unflatten(0, inputs.shape)]
    size = (config.num_local_experts, config.num_experts_per_tok)
    balancing = torch.stack([load_balancing_loss_func((rows,), *size) for rows in sequences]).sum() / len(routers)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    (loss + coefficient / BATCH * balancing).backward()
    torch.testing.assert_close(balance.total(), balancing.detach().double(), rtol=1e-5, atol=1e-6)

    expected = _as_stored(model, tmp_path / "gradients")
    for (tensor, _), gradient in gradients(decoder).items():
        torch.testing.assert_close(gradient, expected[tensor], rtol=1e-4, atol=2e-6, msg=tensor)
    plain = build(config, ALONE)
    plain.load_state_dict(decoder.state_dict())
    backward(plain)
    routed = [key for key in expected if key.endswith(".gate.weight")]
    without = {tensor: gradient for (tensor, _), gradient in gradients(plain).items()}
    assert all((without[key] - expected[key]).abs().max() > 1e-3 for key in routed), (
        "the loss must be large enough to be seen"
    )


@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])
def test_the_z_loss_and_its_gradients_equal_the_formula(name: str) -> None:
    config = config_of(name)
    plain, mine = build(config, ALONE), build(config, ALONE)
    routed: list[torch.Tensor] = []
    for router in (module for module in plain.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda gate, given, _: routed.append(given[0] @ gate.weight.T))
    inputs, positions, _ = tokens()
    loss = loss_of(plain, plain(inputs, positions, causal_attention))
    z_loss = torch.stack([scores_TE.exp().sum(dim=-1).log().pow(2).mean() for scores_TE in routed]).mean()
    (loss + 0.3 * z_loss).backward()

    balance = RouterBalance(0.0, z_weight=0.3 / (BATCH * LENGTH))
    backward(mine, balance)
    assert float(balance.z_total()) == pytest.approx(BATCH * LENGTH * z_loss.item(), rel=1e-5)
    expected = gradients(plain)
    for key, gradient in gradients(mine).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key[0])
    without = build(config, ALONE)
    backward(without)
    routers = [key for key in expected if key[0].endswith(".gate.weight")]
    found = gradients(without)
    assert all((found[key] - expected[key]).abs().max() > 1e-3 for key in routers), "it must be large enough to be seen"


def _as_stored(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the gradients by the names of stored tensors, since transformers stacks experts in memory."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_gradients_at_tp_equal_one_process(rank_pool: RankPool) -> None:
    rank_pool.run(compare_at_tp, 2)


@pytest.mark.parametrize("cp", [2, 4])
def test_sequences_over_context_parallel_ranks_are_whole_ones(rank_pool: RankPool, cp: int) -> None:
    rank_pool.run(compare_at_cp, cp)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_counts_nothing_twice(recompute: str) -> None:
    balances = [RouterBalance(0.5, z_weight=0.1) for _ in range(2)]
    plain, other = (build(config_of("mixtral"), ALONE, recompute=mode) for mode in ("none", recompute))
    for decoder, balance in zip((plain, other), balances, strict=True):
        backward(decoder, balance)
    assert balances[0].total() == balances[1].total()
    assert balances[0].z_total() == balances[1].z_total() > 0
    expected = gradients(plain)
    assert all(torch.equal(value, expected[key]) for key, value in gradients(other).items())


def test_rows_that_do_not_count_change_nothing() -> None:
    """A padding row must have no loss and send no gradient to the routers."""
    config = config_of("mixtral")
    inputs, positions, _ = tokens()
    alone, padded = build(config, ALONE), build(config, ALONE)
    first = torch.tensor([[True], [False]]).expand_as(inputs)
    balances = RouterBalance(0.5, z_weight=0.1), RouterBalance(0.5, first, z_weight=0.1)
    for decoder, rows, balance in ((alone, 1, balances[0]), (padded, 2, balances[1])):
        hidden = decoder(inputs[:rows], positions[:rows], causal_attention, balance)
        (0 * hidden.sum()).backward()
    torch.testing.assert_close(balances[0].total(), balances[1].total())
    torch.testing.assert_close(balances[0].z_total(), balances[1].z_total())
    routers = [local.name for local in alone.local_params() if local.name.endswith(".gate.weight")]
    for name in routers:
        expected = alone.get_parameter(name).grad
        assert expected is not None
        assert expected.any()
        torch.testing.assert_close(padded.get_parameter(name).grad, expected)


def test_without_gradients_it_is_still_measured() -> None:
    decoder = build(config_of("mixtral"), ALONE)
    inputs, positions, _ = tokens()
    balance = RouterBalance(0.0)
    with torch.no_grad():
        loss_of(decoder, decoder(inputs, positions, causal_attention, balance))
    assert float(balance.total()) > BATCH * config_of("mixtral").num_experts_per_tok


def test_the_coefficient_is_read_from_config_json_and_written_there() -> None:
    config = config_of("mixtral", router_aux_loss_coef=0.03)
    assert config.router_aux_loss_coef == 0.03
    assert config.to_json()["router_aux_loss_coef"] == 0.03
    assert "router_aux_loss_coef" not in config_of("llama3").to_json()


def test_a_routing_checksum_is_that_of_tokens_and_their_experts() -> None:
    chosen_BLK = torch.rand(4, 9, 6).argsort(dim=-1)[..., :2]
    whole = routing_checksum(3, chosen_BLK)
    assert whole == int(whole) > 0
    assert whole == routing_checksum(3, chosen_BLK.flip(-1)), "the order of a token's experts must not count"
    assert whole == routing_checksum(3, chosen_BLK[:1]) + routing_checksum(3, chosen_BLK[1:])
    counted_BL = torch.tensor([True, False, True, True]).unsqueeze(-1).expand(4, 9)
    assert routing_checksum(3, chosen_BLK, counted_BL) == routing_checksum(3, chosen_BLK[[0, 2, 3]])
    assert whole != routing_checksum(2, chosen_BLK)
    changed, moves = set(), set()
    for row, position, k in itertools.product(range(4), range(9), range(2)):
        other_BLK = chosen_BLK.clone()
        other_BLK[row, position, k] = (other_BLK[row, position, k] + 1) % 6
        changed.add(float(routing_checksum(3, other_BLK)))
        moves.add((position, int(chosen_BLK[row, position, k])))
    assert len(changed - {float(whole)}) == len(moves) > 30, "each move must change the sum"
