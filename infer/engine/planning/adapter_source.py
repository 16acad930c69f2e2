"""A low-rank adapter before workers load it: what is served, whether it fits the base, and the SHA-256 of its bytes."""

import hashlib
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ....checkpoint import Checkpoint
from ....checkpoint.format.region import as_bytes
from ....core import dtypes
from ....core.dtypes import DType
from ....core.errors import CheckpointError
from ....core.given_paths import as_path
from ....core.progress import format_bytes
from ....model.adapter_text import check_served_text
from ....model.config import ModelConfig
from ....model.lora.peft_config import to_peft
from ....model.lora.table import is_factor
from ....model.lora.targets import module_of
from ....model.registry import decoder_spec
from ....model.spec import HEAD, DecoderSpec
from ....model.stored_adapter import StoredAdapter, base_identity, check_base
from ..options import EngineOptions
from ..program.lower import lower
from ..program.own_params import own_params
from ..request.events import AdapterInfo
from .memory_plan import MemoryPlan


@dataclass(frozen=True)
class AdapterSource:
    """An adapter that fits the served model.

    Attributes:
        path: the absolute path of its step or folder.
        fingerprint: that of its folder, which workers compare.
        digest: the SHA-256 of its configuration and of its tensors, as they are served.
        rank: the largest rank of its factors.
        size: the bytes of its tensors, as they are served.
        step: the training step of its checkpoint; 0 for a folder of PEFT.
        has_head: whether it has a head of its own.
        has_experts: whether it has factors beside the weights of experts.
    """

    path: str
    fingerprint: str
    digest: str
    rank: int
    size: int = 0
    step: int = 0
    has_head: bool = False
    has_experts: bool = False

    def info(self, name: str, live_requests: int = 0) -> AdapterInfo:
        """Returns the description of the adapter under a name."""
        return AdapterInfo(name, self.digest, self.rank, self.size, self.step, live_requests)

    @staticmethod
    def open(path: Path, base: Checkpoint, config: ModelConfig, plan: MemoryPlan) -> "AdapterSource":
        """Opens an adapter and reads all of it.

        Args:
            path: a step folder, a run folder or a folder of PEFT.
            base: the served checkpoint.
            config: the model of `base`.
            plan: the plan of its memory.

        Raises:
            CheckpointError: it is no adapter of this base, holds what is not served, has a rank above the plan's, a
                head or experts that the plan has no room for, another vocabulary or chat template than the base, or a
                number that is not finite.
        """
        checkpoint = _open(path)
        adapter, model = StoredAdapter.of(checkpoint), decoder_spec(config)
        spec = adapter.decoder(config)
        _check_served(spec, model, checkpoint.path)
        rank, needs = max(each.rank for each in spec.adapters.values()), _needs(checkpoint, model)
        _check_room(checkpoint.path, rank, *needs, plan)
        check_served_text(checkpoint, base)
        if adapter.base.identity:
            check_base(adapter, base_identity(base, config), str(base.path))
        adapter.check_values()
        options = json.dumps(to_peft(adapter.options), sort_keys=True)
        digest, dtype = hashlib.sha256(options.encode()), dtypes.by_name(plan.dtype)
        for name in sorted(checkpoint.tensors):
            digest.update(_line(checkpoint, name, dtype))
        size = dtype.itemsize * sum(math.prod(each.shape) for each in checkpoint.tensors.values())
        checkpoint.folder.require_unchanged()
        place = str(checkpoint.path), checkpoint.folder.fingerprint
        return AdapterSource(*place, digest.hexdigest(), rank, size, checkpoint.step, *needs)


def with_room(options: EngineOptions, config: ModelConfig) -> EngineOptions:
    """Returns the options with numbers for `max_adapter_heads` and `max_adapter_experts`.

    Args:
        options: those of an engine.
        config: the model that it serves.

    Raises:
        CheckpointError: an adapter that is to be loaded at start does not open.
    """
    spec = decoder_spec(config)
    needs = [_needs(_open(as_path(path)), spec) for path in options.adapters.values()]
    given = (options.max_adapter_heads, options.max_adapter_experts)
    heads, experts = (
        (options.num_adapters if any(each[i] for each in needs) else 0) if most is None else most
        for i, most in enumerate(given)
    )
    return replace(options, max_adapter_heads=heads, max_adapter_experts=experts)


def _open(path: Path) -> Checkpoint:
    return Checkpoint.open(path.absolute() if os.path.exists(path) else path)


def _needs(checkpoint: Checkpoint, spec: DecoderSpec) -> tuple[bool, bool]:
    """Returns whether a checkpoint holds a head that is not tied, and factors of experts of a model."""
    heads = {tensor.name for tensor in spec.table if (tensor.param or tensor.name) == HEAD and not tensor.alias}
    experts = {module_of(tensor.name) for tensor in spec.table if tensor.expert is not None}
    names = checkpoint.tensors.keys()
    return not heads.isdisjoint(names), any(name.rpartition(".lora_")[0] in experts for name in names)


def _check_served(spec: DecoderSpec, base: DecoderSpec, path: Path) -> None:
    """Raises CheckpointError if an adapter has more than what is served beside others."""
    own = own_params(lower(base))
    for tensor in spec.table:
        if not tensor.stored:
            continue
        if not is_factor(tensor) and (tensor.param or tensor.name) not in own:
            raise CheckpointError(
                f"{path} holds {tensor.name}, trained whole (modules_to_save), and beside other adapters only norms, "
                "biases of linear layers and the head are served so: merge this adapter into its base and serve that "
                "(tk export --merge)."
            )


def _check_room(path: Path, rank: int, has_head: bool, has_experts: bool, plan: MemoryPlan) -> None:
    """Raises CheckpointError if an adapter is larger than any that the plan has room for."""
    if rank > plan.max_adapter_rank:
        raise CheckpointError(
            f"{path} has factors of rank {rank}, and max_adapter_rank is {plan.max_adapter_rank}. "
            "Start with a larger max_adapter_rank."
        )
    if has_head and not plan.max_adapter_heads:
        raise CheckpointError(
            f"{path} has a head of its own (modules_to_save), and max_adapter_heads is 0. Start with a larger "
            f"max_adapter_heads; a head takes {format_bytes(plan.head_bytes)} on each of {plan.tp} ranks."
        )
    if has_experts and not plan.max_adapter_experts:
        raise CheckpointError(
            f"{path} has factors of experts, and max_adapter_experts is 0. Start with a larger max_adapter_experts; "
            f"those of rank {plan.max_adapter_rank} take {format_bytes(plan.expert_bytes)} on each of {plan.tp} ranks."
        )


def _line(checkpoint: Checkpoint, name: str, dtype: DType) -> bytes:
    """Returns what decides a tensor: its name, dtype, shape, and the SHA-256 of its values."""
    found = checkpoint.read(name, dtype=dtype)
    digest, shape = hashlib.sha256(as_bytes(found.values)), checkpoint.tensors[name].shape
    return f"{name} {dtype.code} {'x'.join(map(str, shape))} {digest.hexdigest()}\n".encode()
