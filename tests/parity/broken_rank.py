"""A rank of the pool with a defect: sequence parallelism does not sum the gradients of tensors that are not split."""

from collections.abc import Iterator

from tk.core.local_params import LocalParam
from tk.parallel.mesh import Group
from tk.parity.rank_loop import Work, serve


def load() -> Work:
    from tk.parity.measure import Measurer
    from tk.train.zero.gradient_exchange import GradientExchange

    def nothing(self: GradientExchange, local: LocalParam) -> Iterator[tuple[Group, int, int]]:
        return iter(())

    GradientExchange._partial = nothing  # type: ignore[method-assign]
    return Measurer()


if __name__ == "__main__":
    serve(load)
