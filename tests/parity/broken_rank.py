"""A rank of the pool with a defect: sequence parallelism does not sum the gradients of tensors that are not split."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tk.parity.rank_loop import Work, serve

if TYPE_CHECKING:
    from tk.core.local_params import LocalParam
    from tk.parallel.mesh import Group
    from tk.train.zero.gradient_exchange import GradientExchange


def no_partial(self: "GradientExchange", local: "LocalParam") -> Iterator[tuple["Group", int, int]]:
    """Stands in for `GradientExchange._partial`, which yields the sums to make."""
    return iter(())


def load() -> Work:
    from tk.parity.measure import Measurer
    from tk.train.zero.gradient_exchange import GradientExchange

    GradientExchange._partial = no_partial  # type: ignore[method-assign]
    return Measurer()


if __name__ == "__main__":
    serve(load)
