"""Finds all problems of a configuration at once; each names its formula, its values and a fix."""

from collections.abc import Iterator
from typing import Final

from ...core.errors import ParallelError
from ...core.integers import ceil_div, round_up
from ...core.layout import Layout
from ...core.local_params import experts_of
from ...core.tensors import Table, TensorSpec, num_experts, num_layers, split_boxes
from ...model.registry import architectures
from ...model.shape import ModelKeys
from ..config.train_config import TrainConfig
from ..context.modes import AttentionHeads, choose_mode

MOST_TENSORS: Final = 10**6
MOST_RANKS: Final = 2**20
MOST_PASSES: Final = 2**15  # of a rank in a step
TENSORS_PER_LAYER: Final = 16


def problems(config: TrainConfig, table: Table, num_ranks: int | None) -> list[str]:
    """Returns one sentence per problem; none if the run can start.

    Args:
        config: the configuration.
        table: the model's tensors.
        num_ranks: the number of ranks of the job; None = as many as the layout needs.
    """
    found = []
    try:
        layout = config.layout(num_ranks)
    except ParallelError as error:
        found, layout = [str(error)], Layout(tp=config.parallel.tp)
    return list(
        dict.fromkeys(
            [
                *found,
                *_tensors(layout, table),
                *_experts(layout, table),
                *_pipeline(config, table),
                *_routers(config, table),
            ]
        )
    )


def size_problems(config: TrainConfig, keys: ModelKeys, num_ranks: int | None) -> list[str]:
    """Returns one sentence per size that is too large to be planned, or for a rank to list its tensors and passes."""
    found = []
    num_tensors = keys.num_hidden_layers * (TENSORS_PER_LAYER + 3 * _num_experts(keys))
    if num_tensors > MOST_TENSORS:
        found.append(
            f"[model]: num_hidden_layers = {keys.num_hidden_layers:,}, with their experts, have some {num_tensors:,} "
            f"tensors; tk has a limit of {MOST_TENSORS:,}. Use fewer layers or experts."
        )
    parallel = config.parallel
    of_one = parallel.tp * parallel.pp * parallel.cp
    num_ranks = num_ranks or of_one * (1 if parallel.dp == "auto" else parallel.dp)
    if num_ranks > MOST_RANKS:
        found.append(f"[parallel]: {num_ranks:,} ranks are more than the limit of {MOST_RANKS:,}. Use fewer.")
    dp = max(1, num_ranks // of_one)
    passes = ceil_div(config.train.global_batch_size, dp * config.train.micro_batch_size) * parallel.num_virtual_stages
    if passes > MOST_PASSES:
        found.append(
            f"[train] global_batch_size / (dp x micro_batch_size) x num_virtual_stages = "
            f"{config.train.global_batch_size:,} / ({dp} x {config.train.micro_batch_size:,}) x "
            f"{parallel.num_virtual_stages:,} = {passes:,} passes per rank and step; tk has a limit of "
            f"{MOST_PASSES:,}. Use larger micro-batches, or more ranks."
        )
    found += _heads(config, keys)
    return found


def _heads(config: TrainConfig, keys: ModelKeys) -> Iterator[str]:
    """Yields a sentence if Ulysses is asked for, but cannot split the heads of a tp rank."""
    parallel = config.parallel
    if parallel.cp > 1:
        heads = AttentionHeads.of_rank(keys.num_attention_heads, keys.num_key_value_heads, parallel.tp, parallel.cp)
        try:
            choose_mode(parallel.cp_mode, heads, config.recompute.mode)
        except ParallelError as error:
            yield f"[parallel] {error}"


def _num_experts(keys: ModelKeys) -> int:
    """Returns the number of experts of a layer, 0 if the architecture has none."""
    return keys.num_local_experts if "num_local_experts" in architectures()[keys.architecture].options else 0


def refuse(found: list[str]) -> None:
    """Raises ParallelError with all problems, if there are any."""
    if len(found) == 1:
        raise ParallelError(found[0])
    if found:
        raise ParallelError("\n".join(f"({number}) {text}" for number, text in enumerate(found, start=1)))


def _tensors(layout: Layout, table: Table) -> Iterator[str]:
    """Yields a sentence for each size of the model that tp does not divide; several tensors may share a size."""
    alike: dict[tuple[str, int, str, int], TensorSpec] = {}
    tp, expert_tp = layout.tp, layout.experts.tp
    for spec in table:
        if (split := spec.split) is not None:
            units = spec.shape[split.dim] // split.sections // split.unit
            alike.setdefault((split.of, units, split.rule, tp if spec.expert is None else expert_tp), spec)
    reasons: set[tuple[str, int]] = set()
    for (of, units, _, size), spec in alike.items():
        try:
            split_boxes(spec, size, 0)
        except ParallelError as error:
            if (of, units) not in reasons:
                yield str(error)
            reasons.add((of, units))


def _experts(layout: Layout, table: Table) -> Iterator[str]:
    count = num_experts(table)
    if layout.experts != layout.dense and count == 0:
        yield "[parallel] ep and expert_tp spread experts over ranks, but the model has none. Leave both out."
    try:
        experts_of(count, layout.experts, 0)
    except ParallelError as error:
        yield str(error)


def _routers(config: TrainConfig, table: Table) -> Iterator[str]:
    rate, coefficient = config.train.router_bias_update_rate, config.train.router_z_loss_coef
    if coefficient and num_experts(table) == 0:
        yield (
            f"[train] router_z_loss_coef = {coefficient:g} weighs the z-loss of routers, which this model does not "
            "have. Remove it, or use an architecture with experts."
        )
    if rate and not any(spec.name.endswith("e_score_correction_bias") for spec in table):
        yield (
            f"[train] router_bias_update_rate = {rate:g} updates biases of routers, which this model does not have. "
            "Remove it, or use an architecture with them (glm4_moe)."
        )
    if rate and config.lora is not None:
        yield (
            f"[train] router_bias_update_rate = {rate:g} updates biases of the base, which an adapter does not hold. "
            "Remove it, or train without [lora]."
        )


def _pipeline(config: TrainConfig, table: Table) -> Iterator[str]:
    parallel = config.parallel
    count, layers = parallel.pp * parallel.num_virtual_stages, num_layers(table)
    if count > 1 and layers < count:
        yield (
            f"[parallel] pp x num_virtual_stages = {parallel.pp} x {parallel.num_virtual_stages} = {count} stages need "
            f"at least that many layers; [model] num_hidden_layers = {layers}. Use fewer stages, or more layers."
        )


def notes(config: TrainConfig, layout: Layout) -> list[str]:
    """Returns one sentence for each setting that works but wastes computation."""
    rows, at_once = config.train.global_batch_size, layout.dp * config.train.micro_batch_size
    if rows % at_once == 0:
        return []
    computed = round_up(rows, at_once)
    return [
        f"[train] global_batch_size % (dp x micro_batch_size) = {rows} % ({layout.dp} x "
        f"{config.train.micro_batch_size}) = {rows % at_once}: {computed - rows} of {computed} rows are empty. "
        f"A multiple of {at_once} has no empty rows."
    ]
