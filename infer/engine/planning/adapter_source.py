"""A low-rank adapter before workers load it: what is served, whether it fits the base, and the SHA-256 of its bytes."""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from ....checkpoint import Checkpoint
from ....checkpoint.format.region import as_bytes
from ....core import dtypes
from ....core.dtypes import DType
from ....core.errors import CheckpointError
from ....model.adapter_text import check_served_text
from ....model.config import ModelConfig
from ....model.lora.peft_config import to_peft
from ....model.lora.table import is_factor
from ....model.spec import DecoderSpec
from ....model.stored_adapter import StoredAdapter, base_identity, check_base
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
    """

    path: str
    fingerprint: str
    digest: str
    rank: int
    size: int = 0
    step: int = 0

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
            CheckpointError: it is no adapter of this base, holds what is not served, has a rank above the plan's,
                another vocabulary or chat template than the base, or a number that is not finite.
        """
        checkpoint = Checkpoint.open(path.absolute() if os.path.exists(path) else path)
        adapter = StoredAdapter.of(checkpoint)
        spec = adapter.decoder(config)
        _check_served(spec, checkpoint.path)
        rank = max(each.rank for each in spec.adapters.values())
        if rank > plan.max_adapter_rank:
            raise CheckpointError(
                f"{checkpoint.path} has factors of rank {rank}, and max_adapter_rank is {plan.max_adapter_rank}. "
                "Start with a larger max_adapter_rank."
            )
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
        return AdapterSource(*place, digest.hexdigest(), rank, size, checkpoint.step)


def _check_served(spec: DecoderSpec, path: Path) -> None:
    """Raises CheckpointError if an adapter has more than factors of weights that every token uses."""
    for tensor in spec.table:
        if not tensor.stored:
            continue
        if not is_factor(tensor):
            raise CheckpointError(
                f"{path} holds {tensor.name}, a tensor of the base that was trained whole (modules_to_save, bias). "
                "Beside other adapters only factors are served: merge this adapter into its base and serve that."
            )
        if tensor.expert is not None:
            raise CheckpointError(
                f"{path} holds {tensor.name}, a factor of an expert, and adapters of experts are not served beside "
                "others: merge this adapter into its base and serve that."
            )


def _line(checkpoint: Checkpoint, name: str, dtype: DType) -> bytes:
    """Returns what decides a tensor: its name, dtype, shape, and the SHA-256 of its values."""
    found = checkpoint.read(name, dtype=dtype)
    digest, shape = hashlib.sha256(as_bytes(found.values)), checkpoint.tensors[name].shape
    return f"{name} {dtype.code} {'x'.join(map(str, shape))} {digest.hexdigest()}\n".encode()
