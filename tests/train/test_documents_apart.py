"""Packed documents never see each other: a row's logits and gradients are those of its documents alone."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.core.labels import IGNORED
from tk.data.batches import MicroBatch
from tk.model.config import ModelConfig
from tk.model.decoder import Decoder
from tk.model.init import initialize_weights
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.tests.model.architectures import ENTRIES, VOCAB
from tk.tests.model.decoders import whole_loss
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.train.engine.attention import attention_within

DOCUMENTS = ((11, 1, 14, 6), (20, 12))  # lengths by row; the longest are above the windows of 9
LENGTH = 32
CPU = torch.device("cpu")


def _decoder(name: str) -> Decoder:
    shape = ModelConfig.from_json(ENTRIES[name].make_config().to_dict())
    decoder = Decoder(shape, LayerContext(ALONE, torch.float32, CPU))
    initialize_weights(decoder, 0)
    return decoder


def _batch() -> MicroBatch:
    random = np.random.default_rng(1)
    inputs, targets = (random.integers(0, VOCAB, (2, LENGTH)) for _ in range(2))
    targets[0, 26:] = IGNORED  # the filling of the first row
    targets[1, :7] = IGNORED  # a question
    return MicroBatch(inputs, targets, tuple(length for row in DOCUMENTS for length in row))


def _loss(decoder: Decoder, batch: MicroBatch) -> torch.Tensor:
    return whole_loss(decoder, torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), batch.documents)


def _pieces() -> list[tuple[int, slice]]:
    ends = [(row, [0, *np.cumsum(lengths).tolist()]) for row, lengths in enumerate(DOCUMENTS)]
    return [(row, slice(*bounds)) for row, places in ends for bounds in pairwise(places)]


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2 sliding", "gpt2"])
def test_a_packed_row_equals_its_documents_alone(name: str) -> None:
    decoder, batch = _decoder(name), _batch()
    loss = _loss(decoder, batch)
    loss.backward()
    packed = {key: parameter.grad for key, parameter in decoder.named_parameters() if parameter.grad is not None}
    tokens, positions = torch.from_numpy(batch.inputs), torch.from_numpy(batch.positions)
    logits = decoder.logits(decoder(tokens, positions, attention_within(batch.documents)))
    decoder.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for row, place in _pieces():
        alone = torch.from_numpy(batch.inputs[row : row + 1, place])
        own = decoder.logits(decoder(alone, torch.arange(alone.shape[1])[None], attention_within(())))
        torch.testing.assert_close(logits[row, place], own[0], rtol=1e-5, atol=1e-5)
        piece_loss = whole_loss(decoder, alone, torch.from_numpy(batch.targets[row : row + 1, place]))
        piece_loss.backward()
        total += piece_loss.detach()
    torch.testing.assert_close(loss.detach(), total, rtol=1e-5, atol=0)
    everything = torch.stack([grad.norm() for grad in packed.values()]).norm()
    for key, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        difference = (packed[key] - parameter.grad).norm()
        assert difference <= 1e-5 * parameter.grad.norm() + 1e-7 * everything, key


def test_without_boundaries_documents_see_each_other() -> None:
    decoder, batch = _decoder("llama3"), _batch()
    apart = _loss(decoder, batch)
    together = _loss(decoder, MicroBatch(batch.inputs, batch.targets))
    assert abs(apart.item() - together.item()) > 1e-2


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(2, {"parallel": {"dp": 2}, "zero": {"stage": 3}}, id="dp2"),
        pytest.param(4, {"parallel": {"tp": 2, "dp": 2}, "zero": {"stage": 1}}, id="tp2 dp2", marks=pytest.mark.matrix),
        pytest.param(
            4,
            {"parallel": {"tp": 2, "pp": 2, "sequence_parallel": True}, "recompute": {"mode": "full"}},
            id="tp2 sp pp2",
        ),
    ],
)
def test_layouts_agree_on_packed_examples(
    rank_pool: RankPool,
    configure: Configure,
    examples: Path,
    tmp_path: Path,
    num_ranks: int,
    layout: dict[str, Any],
) -> None:
    """Ranks with different numbers of answers in their rows, the held-out loss included."""
    data = {"sources": [{"path": str(examples)}], "packing": "documents", "eval_fraction": 0.1}
    sections: dict[str, Any] = {"data": data, "train": {"steps": 6, "eval_every": 3}}
    expected = run_training(configure("one", **sections))
    for result in rank_pool.run(run_training, num_ranks, config=configure("many", **layout, **sections)):
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-5)
        np.testing.assert_allclose(result["grad_norm"], expected["grad_norm"], rtol=1e-4)
    mine, theirs = (_evaluations(tmp_path / folder) for folder in ("many", "one"))
    assert len(mine) == 2
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def _evaluations(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_loss"] for line in lines if "eval_loss" in line]
