"""The moments of a backward pass: what is filled, exchanged and gathered at once, counted by hand."""

from tk.core.buckets import buckets
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.core.tensors import TensorSpec
from tk.train.planning.backward_moments import Moment, backward_moments

TABLE = (
    TensorSpec("embedding", (512, 64), None, 0),
    TensorSpec("layer.norm", (64,), None, 1),
    TensorSpec("layer.wide", (256, 64), None, 1),
    TensorSpec("head", (512, 64), None, 2),
)
ROWS, WIDE, LAYER = 512 * 64, 256 * 64, 256 * 64 + 64 + 64  # the layer with padding to 4 x 32 elements


def _moments(zero: int, group_size: int, *, overlap: bool = True) -> list[Moment]:
    layout = Layout(dp=group_size, zero=zero, bucket_size=ROWS)
    plans = buckets(local_params(TABLE, layout, 0), layout)
    return list(backward_moments(plans, layout, 2, overlap))


def test_a_bucket_is_filled_beside_two_exchanges_and_then_exchanged_beside_one() -> None:
    ends, starts = _moments(3, 4)[4:]  # of the embedding's bucket, the last one
    exchanged = ROWS + LAYER
    assert (ends.buckets, ends.received, ends.gradient) == (4 * (ROWS + exchanged), exchanged, 2 * ROWS)
    assert (starts.buckets, starts.received) == (4 * exchanged, exchanged)
    assert ends.on_device == ends.buckets + ends.received + ends.gradient + ends.gathered
    assert ends.gathered == 2 * ROWS, "no other unit follows"


def test_a_unit_is_gathered_with_the_next_one_at_stage_3_only() -> None:
    head, layer = (_moments(3, 4)[place] for place in (0, 2))
    assert head.gathered == layer.gathered == 2 * (ROWS + LAYER)
    assert layer.gradient == 2 * WIDE, "of the largest parameter"
    assert all(each.gathered == 0 for each in _moments(2, 4))
    assert max(each.gathered for each in _moments(3, 4, overlap=False)) == 2 * ROWS


def test_on_a_cpu_an_exchange_copies_what_it_has_received() -> None:
    first, started, *_, last, _ = _moments(3, 4)
    assert (first.copies, started.copies) == (0, ROWS), "this rank's quarter, in fp32"
    assert last.copies == 4 * ROWS + LAYER, "the oldest exchange is whole"
    assert last.on_cpu == last.on_device + last.copies
    assert all(each.copies == 0 for each in _moments(2, 1)), "one rank has none to exchange with"


def test_without_overlap_all_buckets_are_filled_first() -> None:
    filled, exchanged = _moments(2, 2, overlap=False)
    assert (filled.buckets, filled.received, filled.gradient) == (4 * (2 * ROWS + LAYER - 64), 0, 2 * ROWS)
    assert exchanged.buckets == filled.buckets
    assert exchanged.received == 2 * (ROWS + LAYER - 64)
