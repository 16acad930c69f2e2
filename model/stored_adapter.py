"""An adapter in a checkpoint: its options, its base, and the check of its tensors against the base's model."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..checkpoint.convert.identity import weights_identity
from ..checkpoint.format.adapter_record import BaseRecord
from ..checkpoint.read.reader import Checkpoint
from ..core import dtypes
from ..core.casts import widen
from ..core.errors import CheckpointError, ConfigError, ShapeMismatch
from ..core.tensors import TensorSpec
from .config import ModelConfig
from .lora.options import LoraOptions
from .lora.peft_config import FAN_IN_FAN_OUT, from_peft
from .lora.quick_patterns import require_quick
from .lora.table import with_adapters
from .lora.targets import module_of, repeating_expressions, without_idle
from .registry import decoder_spec, tensor_table
from .spec import DecoderSpec

_ELEMENTS: Final = 2**20  # that are checked at once


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter in a checkpoint.

    Attributes:
        checkpoint: the checkpoint, whose tensors are the adapter's.
        options: those that decide its tensors and product.
        base: the record of its base.
    """

    checkpoint: Checkpoint
    options: LoraOptions
    base: BaseRecord

    @property
    def config(self) -> Mapping[str, Any]:
        """The keys of PEFT's adapter_config.json."""
        record = self.checkpoint.manifest.adapter
        assert record is not None
        return record.config

    @staticmethod
    def of(checkpoint: Checkpoint) -> "StoredAdapter":
        """Returns the adapter of a checkpoint.

        Raises:
            CheckpointError: the checkpoint holds a model, or an adapter that tk does not build.
        """
        record = checkpoint.manifest.adapter
        if record is None:
            raise CheckpointError(
                f"{checkpoint.path} holds a model, not an adapter of one. Name the folder of an adapter; "
                "a model needs no base and no merge."
            )
        return StoredAdapter(checkpoint, from_peft(record.config, str(checkpoint.path)), record.base)

    def decoder(self, config: ModelConfig) -> DecoderSpec:
        """Returns the base's decoder with this adapter.

        Args:
            config: the shape of the base.

        Raises:
            ShapeMismatch: a stored tensor meets no module, has another shape, no floating dtype, or is missing.
        """
        where = self.checkpoint.path
        try:
            base = decoder_spec(config)
            require_quick(
                repeating_expressions(self.options), [module_of(each.name) for each in base.table], str(where)
            )
            spec = with_adapters(base, without_idle(base.table, self.options))
        except ConfigError as error:
            raise ShapeMismatch(f"{where} is no adapter of this base: {error}") from error
        transposed = self.config.get(FAN_IN_FAN_OUT)
        if transposed not in (None, spec.transposed):
            raise ShapeMismatch(
                f"{where}: {FAN_IN_FAN_OUT} = {json.dumps(transposed)}, but weights of {config.architecture} are "
                f"stored {'[in, out]' if spec.transposed else '[out, in]'}. Correct it, or name the right base."
            )
        wanted = {tensor.name: tensor for tensor in spec.table if tensor.stored}
        for name, found in self.checkpoint.tensors.items():
            if name not in wanted:
                raise ShapeMismatch(
                    f"{where} holds {name}, which meets no module of its base with these options. "
                    "Name the base that it was trained on."
                )
            if tuple(found.shape) != wanted[name].shape:
                problem = _wrong_shape(str(where), wanted[name], tuple(found.shape))
                raise ShapeMismatch(f"{problem} Name the base that it was trained on.")
            if dtypes.by_code(found.slots["weight"]) not in dtypes.COMPUTE_DTYPES:
                raise ShapeMismatch(
                    f"{where}: {name} is stored as {found.slots['weight']}, and an adapter's values are "
                    f"{', '.join(dtype.code for dtype in dtypes.COMPUTE_DTYPES)}. Save it in one of these."
                )
        missing = [name for name in wanted if name not in self.checkpoint.tensors]
        if missing:
            raise ShapeMismatch(f"{where} has no {missing[0]}, which its configuration requires.")
        return spec

    def check_values(self) -> None:
        """Reads all values once.

        Raises:
            CheckpointError: a value is NaN or infinite: the model would answer with NaN alone.
            ShardCorrupt: stored bytes do not match their checksum.
        """
        for name, tensor in self.checkpoint.tensors.items():
            size = math.prod(tensor.shape)
            for begin in range(0, size, _ELEMENTS):
                part = self.checkpoint.read(name, flat=(begin, min(begin + _ELEMENTS, size)))
                if not np.isfinite(widen(part.values, part.dtype)).all():
                    raise CheckpointError(
                        f"{self.checkpoint.path}: {name} holds NaN or an infinity, with which every answer would be "
                        "NaN. Use an earlier step of its training."
                    )
        self.checkpoint.folder.require_unchanged()


def _wrong_shape(where: str, wanted: TensorSpec, found: tuple[int, ...]) -> str:
    return f"{where}: {wanted.name} has shape {list(found)}, but its base and rank require {list(wanted.shape)}."


def check_base(adapter: StoredAdapter, identity: str, path: str) -> None:
    """Raises CheckpointError if a base is not the one that an adapter was trained on.

    Args:
        adapter: an adapter with the record of its base.
        identity: that of the base to be used.
        path: the folder of the base to be used.
    """
    if adapter.base.identity and adapter.base.identity != identity:
        raise CheckpointError(
            f"{adapter.checkpoint.path} is an adapter of another base than {path}: it was trained on "
            f"{adapter.base.path or 'a base'} with the identity {adapter.base.identity[:16]}..., and {path} has "
            f"{identity[:16]}... Name the right base."
        )


def base_identity(base: Checkpoint, config: ModelConfig) -> str:
    """Returns the identity by which adapters name a base; all weights are read unless it is known from an earlier time.

    Args:
        base: the checkpoint of the base.
        config: the shape of its model.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    return weights_identity(base, [tensor.name for tensor in tensor_table(config) if not tensor.alias])
