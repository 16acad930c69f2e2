"""The cuts of top-k and top-p against the tokens that numpy's sampler keeps, on logits with ties and extremes."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

from tk.core.casts import Array
from tk.infer.engine.kernels.sampler import numpy_sampler
from tk.infer.engine.kernels.triton.rows.filters import TILE, find_cuts
from tk.infer.engine.kernels.triton.rows.samples import OptionColumns, SampleShape, sample
from tk.infer.engine.kernels.triton.step.device_tables import RowOptions
from tk.infer.engine.kernels.triton.step.step_columns import row_columns
from tk.infer.engine.step.sampling_rows import SamplingRows
from tk.tests.infer.engine.kernels.triton.one_step import on_device
from tk.tests.infer.engine.kernels.triton.where import DEVICE
from tk.tests.infer.sampling_row import SamplingRow, pack

pytestmark = pytest.mark.triton
VOCAB: Final = TILE + 300
DRAWS: Final = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 3
SPREAD: Final = np.linspace(-3.4e38, 3.4e38, VOCAB, dtype=np.float32)  # half of the scores are -inf
LOGITS: Final[dict[str, Callable[[], Array]]] = {
    "random": lambda: DRAWS,
    "ties": lambda: np.round(DRAWS),
    "equal": lambda: np.full(VOCAB, 1.5, np.float32),
    "spread": lambda: SPREAD,
    "steep": lambda: np.where(DRAWS > 8, DRAWS, np.float32(-90)),  # all but a few weigh nothing
}
CASES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("random", {"top_k": 1}),
    ("random", {"top_k": 40, "top_p": 0.5, "temperature": 0.7}),
    ("random", {"top_p": 0.95, "temperature": 3.0}),
    ("random", {"top_p": 1e-9}),
    ("ties", {"top_k": 300, "top_p": 0.99}),
    ("equal", {"top_k": TILE + 7}),
    ("equal", {"top_p": 0.9}),
    ("equal", {"top_k": 3, "top_p": 0.9}),
    ("spread", {"top_k": VOCAB - 1}),
    ("spread", {"top_k": VOCAB + 1, "top_p": 0.5, "temperature": 1e-6}),
    ("steep", {"top_k": VOCAB - 1, "top_p": 1 - 2.0**-24}),
    ("random", {}),
]


def options(rows: SamplingRows) -> RowOptions:
    """Returns the options as the device has them."""
    return RowOptions.of({name: on_device(each.copy()) for name, each in row_columns(rows).items()})


def kept(logits_V: Array, row: SamplingRow) -> Array:
    """Returns the ids that the host's filters keep."""
    with np.errstate(over="ignore"):
        scores_V = logits_V - logits_V.max()
        scores_V = scores_V / np.float32(row.temperature) if row.temperature != 1 else scores_V
    ids_K = np.flatnonzero(scores_V > -np.inf)
    ids_K = numpy_sampler._keep_top_k(ids_K, scores_V[ids_K], row.top_k)
    return numpy_sampler._keep_top_p(ids_K, scores_V[ids_K], float(np.float32(row.top_p)), len(scores_V))


def test_cuts_keep_what_the_host_keeps() -> None:
    logits_RV = np.stack([LOGITS[name]() for name, _ in CASES])
    given = [SamplingRow(i, **{"temperature": 1.0, **changed}) for i, (_, changed) in enumerate(CASES)]
    shape, of_rows = SampleShape.of(VOCAB), options(pack(given))
    columns = OptionColumns(*(of_rows.columns[name] for name in OptionColumns._fields))
    bests_RB = torch.full((len(given), shape.num_blocks), -np.inf, device=DEVICE)
    bests_RB[:, 0] = on_device(logits_RV.max(axis=1))
    cuts = find_cuts(on_device(logits_RV), columns, bests_RB, shape)
    for i, row in enumerate(given):
        with np.errstate(over="ignore"):
            scores_V = (logits_RV[i] - logits_RV[i].max()) / np.float32(row.temperature)
        keys_V = scores_V.view(np.uint32) & 0x7FFFFFFF
        key, last = int(cuts.key[i]) & 0xFFFFFFFF, int(cuts.last[i])
        is_kept = (keys_V < 0x7F800000) & ((keys_V < key) | ((keys_V == key) & (np.arange(VOCAB) <= last)))
        np.testing.assert_array_equal(np.flatnonzero(is_kept), kept(logits_RV[i], row), str(CASES[i]))


@pytest.mark.parametrize("vocab", [1, 5])
def test_tokens_of_filtered_rows_are_those_of_the_hosts_sampler(vocab: int) -> None:
    logits_RV = np.round(np.random.default_rng(vocab).normal(size=(6, vocab)) * 2).astype(np.float32)
    logits_RV[5, 0] = -np.inf  # not finite: the row has no token
    filters: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}, {"min_p": 1.0}, {"top_k": 9}]
    rows = pack([SamplingRow(i, temperature=1.5, seed=i, **each) for i, each in enumerate([*filters, {"top_k": 1}])])
    expected = numpy_sampler.sample(logits_RV, rows)
    found = sample(on_device(logits_RV), options(rows)).cpu().numpy()
    np.testing.assert_array_equal(found[0], expected.token_ids)
    np.testing.assert_array_equal(found[1], expected.finite)
