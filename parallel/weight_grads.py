"""Weight gradients put off, for pipeline schedules that fill their bubbles with them (arXiv 2401.10241, section 2).

There a backward pass is two: B gives the gradients of inputs, which other stages wait for, W those of weights, which
only the optimizer waits for.
"""

from collections.abc import Callable

PutOff = Callable[[], None]


class WeightGradQueue:
    """Collects the weight gradients of products whose forward ran while it was `enabled`.

    Every rank of a tensor-parallel group takes and runs the same ones in the same order: they may communicate.

        queue.enabled = True
        loss = ...                      # F
        loss.backward()                 # B
        later = queue.take()
        ...
        run(later)                      # W
    """

    def __init__(self) -> None:
        self.enabled = False
        self._waiting: list[PutOff] = []

    def put(self, compute: PutOff) -> None:
        """Keeps what computes and accumulates one weight's gradient."""
        self._waiting.append(compute)

    def take(self) -> list[PutOff]:
        """All that were put since the last time, in backward's order; from now on they are the caller's to run."""
        waiting, self._waiting = self._waiting, []
        return waiting


def run(put_off: list[PutOff]) -> None:
    """Computes them, emptying the list, so that each one's inputs are freed as soon as it is done."""
    put_off.reverse()
    while put_off:
        put_off.pop()()
