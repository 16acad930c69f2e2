"""Recomputation keeps less for backward, and changes no bit of any gradient."""

from typing import Any

import pytest
import torch

from tk.core.layout import Layout
from tk.model.decoder import Decoder
from tk.model.recompute import Recompute
from tk.parallel.mesh import ALONE, Group, Mesh
from tk.parallel.weight_grads import WeightGradQueue, run_deferred
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import backward, build, config_of, gradients, loss_of, tokens
from tk.tests.rank_pool import RankPool
from tk.train.engine.attention import causal_attention


def _same_gradients(name: str, tp: Group, **options: Any) -> None:
    results = []
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    for mode in modes:
        queue = WeightGradQueue()
        queue.enabled = bool(options.get("deferred"))
        decoder = build(
            config_of(name), tp, recompute=mode, weight_grads=queue, sequence_parallel=options.get("sequence", False)
        )
        loss = backward(decoder)
        run_deferred(queue.take())
        results.append((loss, gradients(decoder)))
    (loss, expected), *others = results
    for other, found in others:
        assert torch.equal(other, loss)
        for key, value in found.items():
            assert torch.equal(value, expected[key]), (name, key)


def _kept_bytes(decoder: Decoder) -> int:
    """Returns the bytes that one forward pass keeps for backward, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []  # keeps every storage alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    inputs, positions, _ = tokens()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(decoder, decoder(inputs, positions, causal_attention))
    return sum(kept.values())


def check_at_tp() -> None:
    tp = Mesh.build(Layout(tp=2), 2).tp
    for sequence in (False, True):
        for name in ("qwen3", "mixtral"):
            _same_gradients(name, tp, sequence=sequence, deferred=sequence)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", ENTRIES)
def test_gradients_are_bit_equal(name: str, deferred: bool) -> None:
    _same_gradients(name, ALONE, deferred=deferred)


def test_gradients_are_bit_equal_at_tp(rank_pool: RankPool) -> None:
    rank_pool.run(check_at_tp, 2)


@pytest.mark.parametrize("name", ENTRIES)
def test_less_is_kept(name: str) -> None:
    config = config_of(name)
    none = _kept_bytes(build(config, ALONE))
    selective = _kept_bytes(build(config, ALONE, recompute="selective"))
    full = _kept_bytes(build(config, ALONE, recompute="full"))
    assert selective < 0.9 * none
    assert full < 0.3 * selective


def test_nothing_is_kept_without_gradients() -> None:
    decoder = build(config_of("llama3"), ALONE, recompute="full")
    inputs, positions, _ = tokens()
    with torch.no_grad():
        assert not decoder(inputs, positions, causal_attention).requires_grad
