"""The axes of the matrix, one entry each: its values, its key in a configuration, and the rules that it brings."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from .space import Rule


@dataclass(frozen=True, slots=True)
class ParityAxis:
    """An axis of the matrix.

    Attributes:
        name: that of the field of ParityLayout.
        values: all that layouts have, beginning with the default.
        key: the key of a training configuration that takes the value, "section.key"; "" if the subject translates it.
        strength: the default set has every combination of values of so many axes of at least this strength, 2 or 3.
        of_model: whether it varies the model or its data, and not the ranks; a user's own model has it as configured.
        foreign: whether the layouts of foreign modules have it: `initialize` supports it.
        checked_with: the axes before it that one of the subject's checks compares it with. Each group is checked with
            all other axes at their defaults.
        rules: rules in plain words, on this axis and axes before it, for repetitions and for what many layouts would
            refuse in words of their own.
    """

    name: str
    values: tuple[object, ...]
    key: str = ""
    strength: int = 3
    of_model: bool = False
    foreign: bool = False
    checked_with: tuple[tuple[str, ...], ...] = ()
    rules: tuple[Rule, ...] = ()


def _after_states(optimizer: str, other: str) -> str:
    is_first = optimizer == "none" and other != "none"
    return "gradients and parameters leave the device only with the optimizer's states" if is_first else ""


def _without_experts(experts: str | None, spreads_them: bool) -> str:
    return "a model without experts has none to spread over ranks" if experts == "none" and spreads_them else ""


_ALL: Final = (
    ParityAxis("tp", (1, 2, 4), "parallel.tp"),
    ParityAxis("pp", (1, 2, 4), "parallel.pp"),
    ParityAxis("dp", (1, 2, 4), "parallel.dp", foreign=True, checked_with=(("tp", "pp"),)),
    ParityAxis("cp", (1, 2, 4), "parallel.cp", checked_with=(("tp", "pp", "dp"),)),
    ParityAxis(
        "cp_mode",
        ("gather", "ulysses"),
        "parallel.cp_mode",
        checked_with=(("tp", "cp"),),
        rules=(
            Rule(
                ("cp", "cp_mode"),
                lambda cp, mode: (
                    "at cp = 1 attention exchanges nothing: both modes are one" if mode == "ulysses" and cp == 1 else ""
                ),
            ),
        ),
    ),
    ParityAxis(
        "schedule",
        ("1f1b", "gpipe", "interleaved", "zb-h1"),
        "parallel.schedule",
        checked_with=(("pp", "dp"),),
    ),
    ParityAxis(
        "zero",
        (0, 1, 2, 3),
        "zero.stage",
        foreign=True,
        rules=(
            Rule(
                ("dp", "cp", "zero"),
                lambda dp, cp, zero: (
                    "at dp x cp = 1 ZeRO stage 1 shards nothing: it equals stage 0"
                    if zero == 1 and dp * cp == 1
                    else ""
                ),
            ),
        ),
    ),
    ParityAxis(
        "shard_size",
        (0, 1, 2),
        "zero.shard_size",
        foreign=True,
        checked_with=(("dp", "cp", "zero"),),
        rules=(
            Rule(
                ("zero", "shard_size"),
                lambda zero, shard_size: (
                    "ZeRO stage 0 shards nothing: shard_size has no effect" if shard_size and zero == 0 else ""
                ),
            ),
            Rule(
                ("dp", "cp", "shard_size"),
                lambda dp, cp, shard_size: (
                    "shard_size = dp x cp shards over all of it: it equals shard_size = 0"
                    if shard_size == dp * cp
                    else ""
                ),
            ),
        ),
    ),
    ParityAxis(
        "sequence_parallel",
        (False, True),
        "parallel.sequence_parallel",
        checked_with=(("tp",),),
        rules=(
            Rule(
                ("tp", "sequence_parallel"),
                lambda tp, sequence_parallel: (
                    "at tp = 1 sequence_parallel splits nothing: it equals the layout without it"
                    if sequence_parallel and tp == 1
                    else ""
                ),
            ),
        ),
    ),
    ParityAxis("recompute", ("none", "selective", "full"), "recompute.mode"),
    ParityAxis("tied", (False, True), of_model=True),
    ParityAxis(
        "kv_heads",
        ("heads", "fewer", "fewer than tp"),
        of_model=True,
        checked_with=(("tp", "pp", "schedule", "tied"),),
    ),
    ParityAxis("experts", ("none", "mixtral", "qwen2_moe", "glm4_moe"), of_model=True, checked_with=(("tp", "pp"),)),
    ParityAxis(
        "ep",
        (1, 2, 4),
        "parallel.ep",
        checked_with=(("tp", "dp", "cp", "experts"),),
        rules=(Rule(("experts", "ep"), lambda experts, ep: _without_experts(experts, ep > 1)),),
    ),
    ParityAxis(
        "expert_tp",
        (0, 1, 2),
        "parallel.expert_tp",
        strength=2,
        checked_with=(("tp", "dp", "cp", "experts", "ep"),),
        rules=(
            Rule(("experts", "expert_tp"), lambda experts, expert_tp: _without_experts(experts, expert_tp > 0)),
            Rule(
                ("tp", "ep", "expert_tp"),
                lambda tp, ep, expert_tp: (
                    "it equals expert_tp = 0, which is tp at ep = 1, else 1"
                    if expert_tp == (tp if ep == 1 else 1)
                    else ""
                ),
            ),
        ),
    ),
    ParityAxis(
        "mlp_block",
        (0, 3),
        "recompute.mlp_block",
        rules=(
            Rule(
                ("experts", "mlp_block"),
                lambda experts, mlp_block: (
                    "layers of experts have no dense MLP: mlp_block has no effect"
                    if mlp_block and experts not in (None, "none")
                    else ""
                ),
            ),
        ),
    ),
    ParityAxis("packing", ("concat", "documents"), "data.packing", of_model=True),
    ParityAxis("window", (False, True), of_model=True, checked_with=(("experts",),)),
    ParityAxis("targets", ("all", "answers"), strength=2, of_model=True),
    ParityAxis(
        "seq_len",
        (16, 15),
        "train.seq_len",
        strength=2,
        of_model=True,
        checked_with=(("tp", "cp", "sequence_parallel"),),
    ),
    ParityAxis("lora", ("none", "all-linear"), strength=2, of_model=True),
    ParityAxis("offload_optimizer", ("none", "cpu", "disk"), "offload.optimizer", strength=2, foreign=True),
    ParityAxis(
        "offload_gradients",
        ("none", "cpu", "disk"),
        "offload.gradients",
        strength=2,
        foreign=True,
        rules=(Rule(("offload_optimizer", "offload_gradients"), _after_states),),
    ),
    ParityAxis(
        "offload_parameters",
        ("none", "cpu", "disk"),
        "offload.parameters",
        strength=2,
        foreign=True,
        rules=(
            Rule(("offload_optimizer", "offload_parameters"), _after_states),
            Rule(
                ("zero", "offload_parameters"),
                lambda zero, parameters: (
                    "below ZeRO stage 3 parameters are not offloaded" if zero < 3 and parameters != "none" else ""
                ),
            ),
        ),
    ),
    ParityAxis("offload_activations", ("none", "cpu"), "offload.activations", strength=2, foreign=True),
)
AXES: Final[Mapping[str, ParityAxis]] = MappingProxyType({axis.name: axis for axis in _ALL})
FOREIGN_AXES: Final = tuple(axis.name for axis in _ALL if axis.foreign)
OFFLOAD_AXES: Final = tuple(axis.name for axis in _ALL if axis.key.startswith("offload."))
