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


def check_cuts(logits_RV: Array, filters: list[dict[str, Any]]) -> list[list[int]]:
    """Compares the cuts of rows with what the host keeps; returns the ids that are kept."""
    given = [SamplingRow(i, **{"temperature": 1.0, **changed}) for i, changed in enumerate(filters)]
    vocab = logits_RV.shape[1]
    shape, of_rows = SampleShape.of(vocab), options(pack(given))
    columns = OptionColumns(*(of_rows.columns[name] for name in OptionColumns._fields))
    bests_RB = torch.full((len(given), shape.num_blocks), -np.inf, device=DEVICE)
    bests_RB[:, 0] = on_device(logits_RV.max(axis=1))
    cuts = find_cuts(on_device(logits_RV), columns, bests_RB, shape)
    found = []
    for i, row in enumerate(given):
        with np.errstate(over="ignore"):
            scores_V = (logits_RV[i] - logits_RV[i].max()) / np.float32(row.temperature)
        keys_V = scores_V.view(np.uint32) & 0x7FFFFFFF
        key, last = int(cuts.key[i]) & 0xFFFFFFFF, int(cuts.last[i])
        is_kept = (keys_V < 0x7F800000) & ((keys_V < key) | ((keys_V == key) & (np.arange(vocab) <= last)))
        np.testing.assert_array_equal(np.flatnonzero(is_kept), kept(logits_RV[i], row), str(filters[i]))
        found.append(np.flatnonzero(is_kept).tolist())
    return found


def test_cuts_keep_what_the_host_keeps() -> None:
    check_cuts(np.stack([LOGITS[name]() for name, _ in CASES]), [changed for _, changed in CASES])


def among(logits: dict[int, float], vocab: int) -> Array:
    """Returns logits of a vocabulary whose other tokens weigh nothing, but are finite."""
    found = np.full(vocab, -200, np.float32)
    found[list(logits)] = list(logits.values())
    return found


@pytest.mark.parametrize("vocab", [TILE - 1, TILE + 1])
def test_ties_at_the_cut_go_to_the_lowest_ids(vocab: int) -> None:
    """On both sides of a tile's end, and where the last token of the vocabulary is the best."""
    four = [5, TILE - 4, TILE - 3, vocab - 1]
    equals = among(dict.fromkeys(four, 0.0), vocab)
    behind = among({vocab - 1: 2.0, **dict.fromkeys(four[:3], 0.0)}, vocab)
    every = np.zeros(vocab, np.float32)
    cases: list[tuple[Array, dict[str, Any], list[int]]] = [
        *((equals, {"top_k": k}, four[:k]) for k in (1, 2, 3, 4)),
        *((behind, {"top_k": k}, sorted([four[3], *four[: k - 1]])) for k in (1, 2, 4)),
        # The better ones weigh exactly top_p of all: then the next one is left out.
        *((equals, {"top_p": k / 4}, four[:k]) for k in (1, 2, 3)),
        (equals, {"top_p": 2**-20, "temperature": 1e30}, [5]),
        (equals, {"top_k": 3, "top_p": 2 / 3}, four[:3]),  # 2 / 3 in fp32 is larger
        (equals, {"top_k": 4, "top_p": 0.5, "temperature": 1e-30}, four[:2]),
        (every, {"top_k": vocab - 1}, list(range(vocab - 1))),
        (every, {"top_k": vocab}, list(range(vocab))),
    ]
    found = check_cuts(np.stack([logits_V for logits_V, *_ in cases]), [filters for _, filters, _ in cases])
    assert found == [expected for *_, expected in cases]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.5}], ids=str)
def test_a_score_at_the_end_of_a_pass_is_behind_a_cut_that_the_best_token_fills(filters: dict[str, Any]) -> None:
    """Passes compare keys with these, two bits at a time: a key that equals one is not better than it."""
    ends = np.array([1 << 28, 2 << 28, 3 << 28], np.uint32).view(np.float32)
    rows = np.stack([among({7: 0.0, 8: -float(end)}, 40) for end in ends])
    assert check_cuts(rows, [filters] * 3) == [[7]] * 3


def test_a_share_just_beside_a_sum_of_weights_counts() -> None:
    """The share is between two steps of the weights: a fifth of a step more than the best token weighs, or less."""
    more, less = among({9: 0.0, 4: -1.326686143875122}, VOCAB), among({9: 0.0, 4: -2.2322070598602295}, VOCAB)
    filters = [{"top_p": 0.790291965007782}, {"top_p": 0.9031046628952026}]
    assert check_cuts(np.stack([more, less]), filters) == [[4, 9], [9]]


def test_tokens_without_a_weight_are_kept_by_top_k_alone() -> None:
    """Those of which the logit is -inf never are. Scores beyond -80, where weights end, differ nevertheless."""
    far = among({7: 0.0, 8: -300.0, 6: -100.0}, VOCAB)
    far[100:] = -np.inf
    filters: list[dict[str, Any]] = [{"top_k": 2}, {"top_k": 2, "top_p": 0.99}, {"top_k": 99}, {"top_k": VOCAB - 1}]
    found = check_cuts(np.stack([far] * 4), filters)
    assert found == [[6, 7], [7], [i for i in range(100) if i != 8], list(range(100))]


def test_min_p_compares_with_the_logarithm_in_fp64() -> None:
    """One score is the logarithm in fp32, its neighbours are just above and below; of the best score, all equals."""
    seeds, cases = range(6), list[tuple[float, np.float32]]()
    for share in (0.4, 0.2, 1.0):
        min_p = float(np.float32(share))
        at = np.float32(np.log(min_p))
        cases += [(min_p, each) for each in (np.nextafter(at, np.float32(-9)), at, np.nextafter(at, np.float32(0)))]
    rows = [among({9: 0.0, **dict.fromkeys(range(20, 36), float(score))}, 40) for _, score in cases for _ in seeds]
    given = [SamplingRow(i, temperature=1.0, seed=i, min_p=cases[i // len(seeds)][0]) for i in range(len(rows))]
    tokens = sample(on_device(np.stack(rows)), options(pack(given))).cpu().numpy()[0].reshape(len(cases), -1)
    for (min_p, score), drawn in zip(cases, tokens, strict=True):
        is_kept = float(score) >= np.log(min_p)
        assert {token >= 20 for token in drawn.tolist()} >= {is_kept}, (min_p, score)
        assert is_kept or set(drawn.tolist()) == {9}


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
