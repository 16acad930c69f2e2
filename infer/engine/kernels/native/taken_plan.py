"""The plan of a step as the kernels read it, which stays with them while it advances."""

import numpy as np

from ...step.step_plan import Array, StepPlan
from .binding.structures import NativeModel, StepArrays


class TakenPlan:
    """The plan that a model points to, with the arrays that must live meanwhile.

    Arrays of the plan are read in place, so the kernels see it advance (see `StepPlan`).

    Args:
        plan: the plan.
        model: the model, whose `step` it becomes.

    Attributes:
        plan: the plan.
        are_masked: whether one of its rows has a mask.
        can_go_on: whether each span has one token, and that one the only row.
    """

    def __init__(self, plan: StepPlan, model: NativeModel) -> None:
        self.plan = plan
        self.are_masked = plan.rows.are_masked
        self._model = model
        num_spans, num_tokens = len(plan.span_length), len(plan.tokens)
        self.can_go_on = num_spans == num_tokens == len(plan.rows)
        self._spans = np.empty((num_spans, 4), np.int32)
        self._spans[:, 0] = np.cumsum(plan.span_length) - plan.span_length
        self._spans[:, 1] = plan.span_length
        self._spans[:, 3] = np.arange(num_spans) * plan.block_tables.shape[1]
        self._begun = np.empty(num_tokens, np.int32)
        in_place = (plan.tokens, plan.positions, plan.slots, plan.block_tables, plan.rows.token)
        tokens, positions, slots, tables, rows = self._kept = [
            np.ascontiguousarray(each, np.int32) for each in in_place
        ]
        pointers = map(_address, (tokens, positions, slots, self._spans, tables, rows, self._begun))
        model.step = StepArrays(num_tokens, num_spans, len(plan.rows), 0, *pointers)

    def follow(self) -> None:
        """Brings up to date what the kernels read beside the plan's arrays; it follows each change of the plan."""
        plan, size = self.plan, self._model.block_size
        np.subtract(plan.span_context, plan.span_length, out=self._spans[:, 2])
        begun = np.flatnonzero(plan.slots % size == 0)
        self._model.step.begun = len(begun)
        if len(begun):
            self._begun[: len(begun)] = plan.slots[begun] // size

    def went_on(self, steps: int) -> None:
        """Moves on by `steps` what the kernels left: they advance the other arrays themselves (c/exchange.h)."""
        self.plan.span_context[:] += np.int32(steps)
        self.plan.rows.new_number[:] += np.int32(steps)


def _address(array: Array) -> int:
    return int(array.ctypes.data)
