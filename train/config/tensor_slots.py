"""The slots of a run's tensors: what its optimizer keeps of each, and in which dtypes (no torch)."""

from ...core.dtypes import FP32, Precision, by_name
from ...core.tensors import Table, TensorSpec, with_slots
from .sections import OptimizerSection


def with_run_slots(table: Table, params: Precision, optimizer: OptimizerSection) -> tuple[TensorSpec, ...]:
    """Returns the tensors of a run, each with the slots that a checkpoint stores of it; nothing else decides them.

    Args:
        table: the model's tensors; frozen ones have no slot but "weight".
        params: the dtype of the parameters, which have fp32 masters if it is another.
        optimizer: the optimizer's options.
    """
    weight = by_name(params)
    slots = {"weight": weight.code} | dict.fromkeys(("exp_avg", "exp_avg_sq"), by_name(optimizer.states).code)
    return with_slots(table, slots if weight == FP32 else slots | {"master": FP32.code})
