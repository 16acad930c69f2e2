"""The tensors of a model with an adapter: the base's, frozen, and the two factors of each adapted weight.

The names of factors are PEFT's without the prefix "base_model.model.". A factor is split as the side of the weight that
it shares: A [rank, in] with the inputs, B [out, rank] with the outputs. So over tensor-parallel ranks one of the two is
cut, and the other is a replica whose gradient is a partial sum. Weights that are stacked in one parameter have factors
of their own; their A, with equally many columns, are stacked too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...core.errors import ConfigError
from ...core.tensors import TensorSpec
from ..spec import AdapterSpec, DecoderSpec
from .options import LoraOptions
from .targets import adapters_of, module_of, saved_modules


def with_adapters(spec: DecoderSpec, options: LoraOptions) -> DecoderSpec:
    """Returns a decoder whose base is frozen and whose adapters are trained.

    Raises:
        ConfigError: the options do not fit the model; see `adapters_of`. Or a tied head would be trained, a parameter
            in part, or experts would have adapters with dropout, or of different ranks in one layer.
    """
    adapters = adapters_of(spec.table, options)
    trained = _trained_with(spec.table, options, adapters)
    table: list[TensorSpec] = []
    for tensor in spec.table:
        is_trained = tensor.trainable and (tensor.alias or tensor.name) in trained
        table.append(replace(tensor, trainable=is_trained, stored=is_trained))
        if tensor.name in adapters:
            table += factors(tensor, adapters[tensor.name], spec.transposed)
    _check_experts(spec.table, adapters, options.dropout)
    return replace(spec, table=tuple(table), adapters=adapters)


def factor_name(param: str, factor: str) -> str:
    """Returns the name of the module's parameter with factors "A", or "B.q_proj", of the weights in a parameter."""
    owner = f"{param.removesuffix('.weight')}.adapter" if param.endswith(".weight") else f"{param}_adapter"
    return f"{owner}.{factor}"


def leaf(tensor: str) -> str:
    """Returns the last part of the name of a weight's module: q_proj."""
    return module_of(tensor).rpartition(".")[2]


def is_factor(tensor: TensorSpec) -> bool:
    """Returns whether a tensor is A or B of an adapter."""
    return tensor.name.endswith((".lora_A.weight", ".lora_B.weight"))


def factors(tensor: TensorSpec, adapter: AdapterSpec, transposed: bool) -> tuple[TensorSpec, TensorSpec]:
    """Returns A and B of a weight; `transposed` says that it is stored [in, out]."""
    split = tensor.split
    assert split is not None
    of_out = split.dim == int(transposed)
    columns, rows = tensor.shape if transposed else reversed(tensor.shape)
    module, param = module_of(tensor.name), tensor.param or tensor.name
    shared = replace(tensor, alias="", trainable=True, dtype="")
    return (
        replace(
            shared,
            name=f"{module}.lora_A.weight",
            shape=(adapter.rank, columns),
            split=None if of_out else replace(split, dim=1),
            param=factor_name(param, "A"),
            init="uniform",
            partial_grad=of_out,
        ),
        replace(
            shared,
            name=f"{module}.lora_B.weight",
            shape=(rows, adapter.rank),
            split=replace(split, dim=0) if of_out else None,
            param=factor_name(param, f"B.{leaf(tensor.name)}"),
            init="zeros",
            partial_grad=not of_out,
        ),
    )


def _trained_with(
    table: Sequence[TensorSpec], options: LoraOptions, adapters: Mapping[str, AdapterSpec]
) -> frozenset[str]:
    """Returns the tensors of the base that are trained beside the factors."""
    saved = saved_modules(table, options)
    adapted = {module_of(name) for name in adapters}
    for spec in table:
        if spec.alias and saved & {module_of(spec.name), module_of(spec.alias)}:
            raise ConfigError(
                f"[lora] modules_to_save: {module_of(spec.name)} is tied to {module_of(spec.alias)} in this model, and "
                "an adapter with one of the two would untie them wherever it is loaded. Leave both out."
            )
    found = {spec.name for spec in table if not spec.alias and module_of(spec.name) in saved}
    biases = {spec.name for spec in table if spec.name.endswith(".bias")}
    if options.bias == "lora_only":
        biases = {name for name in biases if module_of(name) in adapted}
    found |= set() if options.bias == "none" else biases
    for param, names in _by_parameter(table):
        inside = [name for name in names if name in found]
        if inside and len(inside) < len(names):
            other = next(name for name in names if name not in found)
            raise ConfigError(
                f"[lora] bias and modules_to_save would train {inside[0]} and not {other}: both are parts of one "
                f"parameter ({param}) and are trained together or not at all."
            )
    return frozenset(found)


def _by_parameter(table: Sequence[TensorSpec]) -> Iterator[tuple[str, list[str]]]:
    members: dict[str, list[str]] = {}
    for spec in table:
        if spec.param and not spec.alias:
            members.setdefault(spec.param, []).append(spec.name)
    yield from members.items()


def _check_experts(table: Sequence[TensorSpec], adapters: Mapping[str, AdapterSpec], dropout: float) -> None:
    """Raises ConfigError unless a layer's experts have adapters of one rank and scale, and no dropout, or none."""
    alike: dict[tuple[str, str], AdapterSpec | None] = {}
    for spec in table:
        if spec.expert is None:
            continue
        mine = adapters.get(spec.name)
        if mine and dropout:
            raise ConfigError(
                f"[lora] dropout = {dropout:g}: {module_of(spec.name)} has an adapter, and those of experts have no "
                r"dropout. Set dropout = 0, or leave the experts out: exclude = '.*\.experts\..*'."
            )
        first = alike.setdefault((spec.param, leaf(spec.name)), mine)
        if mine != first:
            raise ConfigError(
                f"[lora] targets and patterns give {module_of(spec.name)} another adapter than expert 0 of its layer, "
                "or only one of the two has one: the experts of a layer have adapters of one rank and alpha."
            )
