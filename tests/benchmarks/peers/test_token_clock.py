"""Speeds from the times of tokens."""

import pytest

from tk.benchmarks.peers.token_clock import NotTogether, SpeedWorkload, speeds


def test_prefill_lasts_until_every_sequence_has_its_first_token() -> None:
    assert speeds(SpeedWorkload(2, 30, 1), 10.0, [[11.0], [13.0]]) == {"prefill": 20.0}


def test_decoding_counts_while_all_sequences_run() -> None:
    # Alone, the first sequence runs twice as fast; so does the second one after the first has ended.
    arrivals = [[1.0, 1.5, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 4.5, 5.0]]
    assert speeds(SpeedWorkload(2, 4, 5), 0.0, arrivals) == {"prefill": 4.0, "decode": 2.0}


def test_tokens_of_a_step_may_arrive_one_after_the_other() -> None:
    arrivals = [[1.99, 2.99, 3.99, 4.99], [2.0, 3.0, 4.0, 5.0]]
    assert speeds(SpeedWorkload(2, 4, 4), 0.0, arrivals)["decode"] == pytest.approx(2.0)


def test_the_median_of_windows_leaves_out_a_slow_one() -> None:
    times = [1.0, 2.0, 3.0, 4.0, 14.0, 15.0, 16.0]
    assert speeds(SpeedWorkload(4, 1, 7, windows=3), 0.0, [times] * 4)["decode"] == 4.0
    assert speeds(SpeedWorkload(4, 1, 7), 0.0, [times] * 4)["decode"] == 4 * 6 / 15


def test_sequences_that_never_ran_together_have_no_decode_speed() -> None:
    with pytest.raises(NotTogether, match="2 sequences ran together for 0 steps; more new tokens"):
        speeds(SpeedWorkload(2, 4, 2), 0.0, [[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(NotTogether, match="for 2 steps"):
        speeds(SpeedWorkload(1, 4, 3, windows=3), 0.0, [[1.0, 2.0, 3.0]])
