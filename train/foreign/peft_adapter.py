"""The adapter of a module that `peft` wrapped, in the form that a checkpoint keeps it: the adapter without its base.

Nothing of peft is imported: such a module has `peft_config`, the options of its adapters by their names, and
`active_adapters`. Where a checkpoint cannot hold what is trained as a LoRA adapter, the module is saved whole.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...checkpoint.format.adapter_record import AdapterRecord, BaseRecord
from ...checkpoint.format.peft_names import PREFIX
from ...checkpoint.read.reader import Checkpoint
from ...core.dtypes import Precision
from ...core.errors import CheckpointError, TkError
from ...model.lora.options import LoraOptions
from ...model.lora.peft_config import from_peft, to_peft
from ...model.lora.targets import adapter_of, module_of
from ...model.stored_adapter import StoredAdapter, base_identity, check_base
from ...model.stored_config import stored_config

_FACTORS: Final = ("lora_A", "lora_B")
_SELECTING: Final = ("exclude_modules", "layers_to_transform", "layers_pattern")  # which modules have an adapter
_BASE_BIAS: Final = ".base_layer.bias"
_REPLACED: Final = re.compile(r"\.(original_module|modules_to_save)\.")  # what stands beside a module that is trained
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A LoRA adapter that a module trains on a frozen base.

    Attributes:
        names: the parameters of the adapter by their names in the module, each with its name in a checkpoint.
        options: those that decide its tensors and product; the targets are the modules themselves.
        base: the folder or the name of the base that peft knows; "" if it knows none.
    """

    names: Mapping[str, str]
    options: LoraOptions
    base: str

    @staticmethod
    def of(module: nn.Module, log: bool) -> "PeftAdapter | None":
        """Returns the adapter that checkpoints of a module hold; None for a module that is saved whole.

        Args:
            module: any module that passed `frozen_keys`.
            log: whether to log why the adapter of a module is saved together with its base.
        """
        if not getattr(module, "peft_config", None):
            return None
        found = _found(module)
        if isinstance(found, PeftAdapter):
            return found
        if log:
            _log.warning("engine.save stores the base of this %s with its adapter: %s", type(module).__name__, found)
        return None

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules with an adapter, by their names in the base."""
        assert not isinstance(self.options.targets, str)
        return self.options.targets

    def record(self, precision: Precision, known: bool) -> AdapterRecord:
        """Returns the record of the adapter in a manifest.

        Args:
            precision: the numbers of the base's weights.
            known: whether the base's values are those of its folder; then all of them are read once, for the identity.
        """
        folder = Path(self.base) if self.base else None
        if folder is None or not folder.is_dir():
            return AdapterRecord(to_peft(self.options), BaseRecord("", self.base, precision))
        identity = ""
        try:
            if known:
                base = Checkpoint.open(folder)
                identity = base_identity(base, stored_config(base))
        except TkError as error:
            _log.warning("the steps of this adapter name its base %s without its identity: %s", folder, error)
        return AdapterRecord(to_peft(self.options), BaseRecord(identity, str(folder.absolute()), precision))

    def check_stored(self, checkpoint: Checkpoint, record: AdapterRecord | None) -> None:
        """Checks that a checkpoint holds an adapter with the same products; `record`: on rank 0, to compare the bases.

        Raises:
            CheckpointError: it holds a model, or an adapter of another base, rank or scale.
        """
        stored = StoredAdapter.of(checkpoint)
        if record is not None and record.base.identity:
            check_base(stored, record.base.identity, record.base.path)
        for module in self.modules:
            theirs, ours = (adapter_of(module, options) for options in (stored.options, self.options))
            if (theirs.rank, theirs.scale) != (ours.rank, ours.scale):
                raise CheckpointError(
                    f"{checkpoint.path} has an adapter of another kind: for {module} rank {theirs.rank} and alpha / "
                    f"rank {theirs.scale:g}, and the module rank {ours.rank} and {ours.scale:g}. Give the module the "
                    "options of that adapter."
                )


def frozen_keys(module: nn.Module) -> Iterator[str]:
    """Yields a problem if the factors of a module's adapter, or some of them, are frozen."""
    config, adapter = _lora_of(module)
    if not config:
        return
    keys = {
        name: parameter.requires_grad
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if _stored_name(name, adapter)
    }
    frozen = [name for name, learns in keys.items() if not learns]
    if frozen and not any(keys.values()):
        yield (
            f"its adapter {adapter!r} is frozen, all of it ({frozen[0]} for example), as PeftModel.from_pretrained "
            "does. Load it with PeftModel.from_pretrained(base, folder, is_trainable=True)."
        )
    elif frozen:
        yield (
            f"{frozen[0]} is frozen, and other parts of the adapter {adapter!r} are trained"
            f"{f' (so are {len(frozen) - 1} more)' if len(frozen) > 1 else ''}: it would be saved as one that was "
            "trained. Unfreeze it (requires_grad_(True)), or leave its module out of target_modules."
        )


def _lora_of(module: nn.Module) -> tuple[dict[str, Any], str]:
    """Returns the options of a module's one active LoRA adapter and its name; no options without such an adapter."""
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping):
        return {}, ""
    active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", None) or ()
    active = active() if callable(active) else active
    active = [active] if isinstance(active, str) else list(active)
    if len(active) != 1 or not hasattr(configs.get(active[0]), "to_dict"):
        return {}, ""
    config = {
        key: sorted(value) if isinstance(value, set | frozenset) else value
        for key, value in configs[active[0]].to_dict().items()
    }
    return (config, str(active[0])) if config.get("peft_type") == "LORA" else ({}, "")


def _found(module: nn.Module) -> PeftAdapter | str:
    """Returns a module's adapter, or why a checkpoint cannot hold it without the base."""
    config, adapter = _lora_of(module)
    if not config:
        return "only one active adapter of type LORA can be saved alone."
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = {name: stored for name in parameters if (stored := _stored_name(name, adapter))}
    adapted = sorted({module_of(module_of(name)) for name in names.values() if _is_factor(name)})
    if not adapted:
        return "it has no factors lora_A and lora_B of linear layers."
    chosen = config | dict.fromkeys(_SELECTING) | {"target_modules": adapted}
    try:
        options = from_peft(chosen, f"peft_config[{adapter!r}]")
    except CheckpointError as error:
        return str(error)
    names |= _biases(parameters, options.bias, frozenset(adapted))
    problem = next(_beyond(module, parameters, names), "")
    return problem or PeftAdapter(names, options, str(config.get("base_model_name_or_path") or ""))


def _beyond(module: nn.Module, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str]) -> Iterator[str]:
    """Yields what a module trains or changes beside an adapter, so that the adapter alone would not be all of it."""
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in names:
            yield f"{name} is trained, too, and no part of the adapter."
        if name in names and not parameter.requires_grad:
            yield f"{name} is frozen, and would be taken for trained."
    for name in names:
        others = [other for other, parameter in parameters.items() if parameter is parameters[name] and other != name]
        if others:
            yield f"{name} is one parameter with {others[0]}."
    for name, inner in module.named_modules():
        if isinstance(inner, _NormBase) and inner.running_mean is not None:
            yield f"passes change the running statistics of {name}."


def _stored_name(name: str, adapter: str) -> str:
    """Returns the name that PEFT's files give a parameter, without their prefix; "" if it is not of the adapter."""
    module, _, rest = name.removeprefix(PREFIX).partition(f".modules_to_save.{adapter}.")
    if rest:
        return f"{module}.{rest}"
    for factor in _FACTORS:
        end = f".{factor}.{adapter}.weight"
        if module.endswith(end):
            return f"{module.removesuffix(end)}.{factor}.weight"
    return ""


def _is_factor(stored: str) -> bool:
    return stored.endswith(tuple(f".{factor}.weight" for factor in _FACTORS))


def _biases(parameters: Iterable[str], which: str, adapted: frozenset[str]) -> dict[str, str]:
    """Returns the base's biases that the option `bias` gives to the adapter, each with its name in the base."""
    found: dict[str, str] = {}
    for name in parameters if which != "none" else ():
        stored = name.removeprefix(PREFIX)
        if stored.endswith(_BASE_BIAS):
            stored = f"{stored.removesuffix(_BASE_BIAS)}.bias"
        of_base = stored.endswith(".bias") and not _REPLACED.search(stored)
        if of_base and (which == "all" or module_of(stored) in adapted):
            found[name] = stored
    return found
