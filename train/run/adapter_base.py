"""The base of an adapter that a run trains: its weights, and the record of it that every step keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...checkpoint.format.adapter_record import AdapterRecord, BaseRecord
from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import Peers, open_together, share_errors
from ...core.errors import CheckpointError, ConfigError
from ...model.adapter_text import check_vocabulary
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.lora.peft_config import to_peft
from ...model.lora.table import is_factor
from ...model.spec import DecoderSpec
from ...model.stored_adapter import StoredAdapter, base_identity, check_base
from ..config.initial_model import open_init
from ..config.train_config import TrainConfig
from ..saving.checkpointer import Checkpointer
from .coded_base import load_codes


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The base of a run's adapter.

    Attributes:
        checkpoint: the checkpoint of the base.
        model: the shape of the model.
        spec: the decoder with the adapter.
        record: the record of the adapter, on rank 0; None on other ranks.
    """

    checkpoint: Checkpoint
    model: ModelConfig
    spec: DecoderSpec
    record: AdapterRecord | None

    @staticmethod
    def of(config: TrainConfig, model: ModelConfig, spec: DecoderSpec, ranks: Peers) -> "AdapterBase | None":
        """Returns the base of a run, whose identity rank 0 finds out; None if the run trains no adapter.

        Every rank calls it.

        Raises:
            ConfigError: [lora] has no base.
            CheckpointError: the base cannot be read.
        """
        if config.lora is None:
            return None
        require_base(config)
        checkpoint = open_together(lambda: open_init(config), ranks)
        record = None
        with share_errors(ranks):
            if ranks.rank == 0:
                identity = base_identity(checkpoint, model)
                dtype = config.precision.params if config.lora.base == "auto" else config.lora.base
                base = BaseRecord(identity, str(checkpoint.path.absolute()), dtype)
                record = AdapterRecord(to_peft(config.lora.options), base)
        return AdapterBase(checkpoint, model, spec, record)

    def load(self, checkpointer: Checkpointer, decoders: Sequence[Decoder], readers: Peers) -> None:
        """Fills the weights of the base, in the rank's stages; every rank calls it."""
        factors = frozenset(tensor.name for tensor in self.spec.table if is_factor(tensor))
        checkpointer.load_weights(self.checkpoint, readers, factors)
        if self.spec.base_bits:
            with share_errors(checkpointer.ranks):
                buffers = checkpointer.engine.buffers
                load_codes(decoders, self.checkpoint, buffers.dtype, buffers.device, readers)

    def load_adapter(self, adapter: Checkpoint, checkpointer: Checkpointer, readers: Peers) -> None:
        """Fills the adapter's weights from those of another one; every rank calls it.

        Raises:
            CheckpointError: it is no adapter of this base with the options of this run, has values that are not finite,
                or tokens that the base lacks.
        """
        with share_errors(checkpointer.ranks):
            self.check(adapter)
            if checkpointer.ranks.rank == 0:
                check_vocabulary(adapter, self.checkpoint)
                StoredAdapter.of(adapter).check_values()
        elsewhere = frozenset(tensor.name for tensor in self.spec.table if not tensor.stored)
        checkpointer.load_weights(adapter, readers, elsewhere)

    def check(self, checkpoint: Checkpoint) -> None:
        """Checks that a checkpoint holds an adapter of this base with the options of this run, except its dropout.

        Raises:
            CheckpointError: it does not.
        """
        stored = StoredAdapter.of(checkpoint)
        if self.record is not None:
            check_base(stored, self.record.base.identity, str(self.checkpoint.path))
        theirs, ours = (_products(spec) for spec in (stored.decoder(self.model), self.spec))
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                raise CheckpointError(
                    f"{checkpoint.path} has an adapter of another kind than [lora]: for {name} it has "
                    f"{_described(theirs.get(name))}, and the configuration {_described(ours.get(name))}. Give [lora] "
                    "the options of that adapter, or the new run another folder."
                )


def require_base(config: TrainConfig) -> None:
    """Raises ConfigError if a run trains an adapter of a base that no checkpoint has."""
    if config.lora is not None and not config.model.init:
        raise ConfigError(
            "[lora] trains an adapter of a base: name the base's checkpoint in [model] init, in place of a shape."
        )


def _products(spec: DecoderSpec) -> Mapping[str, Any]:
    """Returns, for every tensor that the adapter trains, the rank and scale of its product; None for others."""
    found: dict[str, Any] = {tensor.name: "whole" for tensor in spec.table if tensor.stored and not is_factor(tensor)}
    return found | {name: (adapter.rank, adapter.scale) for name, adapter in spec.adapters.items()}


def _described(product: Any) -> str:
    if product is None:
        return "none"
    return "the whole tensor" if product == "whole" else f"rank {product[0]} and alpha / rank {product[1]:g}"
