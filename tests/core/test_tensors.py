"""How tensor parallelism cuts a tensor."""

import pytest

from tk.core.errors import ParallelError
from tk.core.tensors import Split, TensorSpec, split_boxes
from tk.tests.core.layouts import HEAD


def test_a_tp_that_does_not_fit_is_refused_with_those_that_do() -> None:
    spec = TensorSpec("q", (6 * HEAD, 8), Split(0, HEAD, of="num_attention_heads"))
    with pytest.raises(ParallelError, match=r"num_attention_heads % tp = 6 % 4 = 2.*fits tp = 1 or 2 or 3 or 6"):
        split_boxes(spec, 4, 0)
    with pytest.raises(ParallelError, match=r"tp = 4 does not fit k.*fits tp = 1 or 3, or a multiple of 3\."):
        split_boxes(TensorSpec("k", (3 * HEAD, 8), Split(0, HEAD, "replicate")), 4, 0)
