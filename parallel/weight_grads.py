"""Deferred weight gradients, with which pipeline schedules fill their bubbles (arXiv 2401.10241, section 2).

A backward pass is split in two: B computes the gradients of inputs, for which other stages wait, and W those of
weights, for which only the optimizer waits.
"""

from collections.abc import Callable

DeferredGrad = Callable[[], None]  # computes and accumulates the gradient of one weight


class WeightGradQueue:
    """The deferred weight gradients of products whose forward ran while the queue was `enabled`.

    They may communicate, so every rank of a tensor-parallel group must run the same ones in the same order.

        queue.enabled = True
        loss = ...                      # F
        loss.backward()                 # B
        deferred = queue.take()
        ...
        run_deferred(deferred)          # W
    """

    def __init__(self) -> None:
        self.enabled = False
        self._deferred: list[DeferredGrad] = []

    def put(self, compute: DeferredGrad) -> None:
        """Adds the function that computes and accumulates one weight's gradient."""
        self._deferred.append(compute)

    def take(self) -> list[DeferredGrad]:
        """Removes and returns all deferred gradients, in the order in which backward added them."""
        deferred, self._deferred = self._deferred, []
        return deferred


def run_deferred(deferred: list[DeferredGrad]) -> None:
    """Computes deferred gradients and empties the list, so that each one's inputs are freed as soon as it is done."""
    deferred.reverse()
    while deferred:
        deferred.pop()()
