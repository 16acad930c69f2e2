"""Results on their way to the host."""

import numpy as np
import torch

from tk.infer.engine.kernels.triton.step.result_copies import ResultCopies, runs


def test_two_copies_may_be_under_way() -> None:
    copies, nothing = ResultCopies(torch.device("cpu"), 3), np.empty(0, np.int64)
    results = [torch.full((2, rows), rows, dtype=torch.int32) for rows in (1, 5)]
    logits_RV = torch.arange(12.0).view(4, 3)
    started = [copies.start(each, logits_RV, nothing) for each in results]
    assert [each.wait()[0].tolist() for each in started] == [each.tolist() for each in results]


def test_only_the_logits_of_rows_that_the_host_samples_come() -> None:
    copies, logits_RV = ResultCopies(torch.device("cpu"), 3), torch.arange(15.0).view(5, 3)
    copy = copies.start(torch.zeros(2, 5, dtype=torch.int32), logits_RV, np.array([0, 2, 3]))
    assert copy.wait()[1].tolist() == logits_RV[[0, 2, 3]].tolist()


def test_runs_of_neighbours() -> None:
    assert runs(np.array([0, 1, 4, 6, 7, 8])) == [slice(0, 2), slice(4, 5), slice(6, 9)]
    assert runs(np.empty(0, np.int64)) == []
