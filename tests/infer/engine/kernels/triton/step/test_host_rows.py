"""The host's answers beside those of the device."""

import numpy as np

from tk.infer.engine.kernels.sampler.sampler import run_sampler
from tk.infer.engine.kernels.triton.step.host_rows import HostRows
from tk.infer.engine.step.sampling_rows import WITH_CANDIDATES
from tk.tests.infer.sampling_row import SamplingRow, pack

LOGITS = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
ROWS = pack(
    [
        SamplingRow(0),
        SamplingRow(1, temperature=1.0, top_k=3, seed=9, bias={7: 2.0}),
        SamplingRow(2, temperature=0.5),
        SamplingRow(3, num_top=2),
        SamplingRow(4, mask=WITH_CANDIDATES, seed=4, temperature=1.0),
    ]
)
DEVICE = np.array([[11, 0, 12, 0, 0], [1, 1, 0, 1, 1]], np.int32)  # what the device says of its own rows, 0 and 2


def test_rows_are_plain_unless_they_ask_for_more() -> None:
    assert ROWS.are_plain.tolist() == [True, False, True, False, False]
    filtered = [SamplingRow(i, temperature=i, top_k=3, top_p=0.5, min_p=0.1) for i in range(2)]
    others = [SamplingRow(2, target=4), SamplingRow(3, mask=0)]
    assert pack(filtered + others).are_plain.tolist() == [True, True, False, False]


def test_both_answer_for_their_rows() -> None:
    host, expected = HostRows(), run_sampler(LOGITS, ROWS)
    host.begin(ROWS)
    others = np.array([1, 3, 4])
    found = host.output(slice(0, 5), others, DEVICE, LOGITS[others], None)
    assert found.token_ids[[0, 2]].tolist() == [11, 12]
    assert found.finite.tolist() == [1, 1, 0, 1, 1]
    for name in ("token_ids", "logprob", "top_ids", "candidates"):
        np.testing.assert_array_equal(getattr(found, name)[others], getattr(expected, name)[others])
    masks = np.array([[0x0000FFFF, 0]], np.uint32)
    again = host.sample_again(masks, np.array([4], np.int32))
    assert again.token_ids[4] == run_sampler(LOGITS, ROWS.masked(np.array([4], np.int32)), masks).token_ids[4]


def test_parts_keep_the_candidates_of_all_rows() -> None:
    host = HostRows()
    host.begin(ROWS)
    for part, others in ((slice(0, 3), np.array([1])), (slice(3, 5), np.array([0, 1]))):
        host.output(part, others, DEVICE[:, part], LOGITS[part][others], None)
    again = host.sample_again(np.array([[0x0000FF00, 0]], np.uint32), np.array([4], np.int32))
    assert 8 <= again.token_ids[4] < 16
