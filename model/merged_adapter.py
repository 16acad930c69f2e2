"""The merge of an adapter into its base: W + scale B A for each weight that has one, tile by tile.

The sum is computed in fp32 and rounded once, to the dtype in which the base stores the weight. A tensor that the
adapter holds whole (`modules_to_save`, a trained bias) replaces the base's. One adapted weight's factors and a few
tiles are in memory at once.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..checkpoint.convert.export import prepare_export
from ..checkpoint.convert.plan import Tile
from ..checkpoint.convert.reshard import Prepared
from ..checkpoint.read.hugging_face import CONFIG
from ..checkpoint.read.reader import Checkpoint
from ..core.casts import Array, cast
from ..core.dtypes import FP32
from ..core.errors import CheckpointError, ConfigError
from .adapter_text import check_vocabulary, merged_text_files
from .config import ModelConfig
from .lora.table import is_factor
from .lora.targets import module_of
from .spec import DecoderSpec
from .stored_adapter import StoredAdapter, base_identity, check_base
from .stored_config import stored_config


class AdapterMerge:
    """A `TileChange` of a base's weights.

    Attributes:
        num_elements: the number of elements of adapted weights that were summed.
        num_kept: the number of them that kept their value, because the sum was rounded to it.
    """

    def __init__(self, adapter: StoredAdapter, spec: DecoderSpec) -> None:
        """Reads nothing.

        Args:
            adapter: the one to be added.
            spec: the base's decoder with it.
        """
        self._adapter, self._spec = adapter.checkpoint, spec
        self._whole = {tensor.name for tensor in spec.table if tensor.stored and not is_factor(tensor)}
        self._factors: tuple[str, Array, Array] | None = None  # of the weight whose tiles are being changed
        self.num_elements = self.num_kept = 0

    def changed(self, tile: Tile, values: Array) -> Array:
        """See TileChange."""
        selection = tile.slot_copy.selection
        name, dtype = selection.tensor, selection.target_dtype
        if name in self._whole:
            flat = (tile.region.start, tile.region.stop)
            own = self._adapter.read(name, flat=flat, dtype=FP32)
            return cast(own.values, FP32, dtype, name)
        if name not in self._spec.adapters:
            return values
        delta = self._delta(name, tile)
        merged = cast(cast(values, dtype, FP32, name) + delta, FP32, dtype, name)
        bits = np.dtype(f"u{dtype.itemsize}")
        self.num_elements += values.size
        self.num_kept += int(np.count_nonzero((merged.view(bits) == values.view(bits)) & (delta != 0)))
        return merged

    def require_unchanged(self) -> None:
        """See TileChange."""
        self._adapter.folder.require_unchanged()

    def facts(self) -> Mapping[str, Any]:
        """See TileChange."""
        return {"adapted_elements": self.num_elements, "kept_elements": self.num_kept}

    def sentence(self) -> str:
        """See TileChange."""
        if not self.num_kept:
            return "every weight with an adapter has its sum"
        share = f"{100 * self.num_kept / self.num_elements:.2g} %"
        return f"{share} of the weights with an adapter kept their value: the sum was rounded away"

    def _delta(self, name: str, tile: Tile) -> Array:
        """Returns the elements of scale B A, in the orientation of the weight, that a tile holds."""
        down, up = self._factors_of(name)
        start, stop = tile.region.start, tile.region.stop
        columns = tile.slot_copy.shape[1]
        first = start // columns
        rows = slice(first, (stop - 1) // columns + 1)
        product = down.T[rows] @ up.T if self._spec.transposed else up[rows] @ down
        scaled: Array = product * np.float32(self._spec.adapters[name].scale)
        return scaled.reshape(-1)[start - first * columns : stop - first * columns]

    def _factors_of(self, name: str) -> tuple[Array, Array]:
        if self._factors is None or self._factors[0] != name:
            module = module_of(name)
            down, up = (self._adapter.read(f"{module}.lora_{each}.weight", dtype=FP32).values for each in "AB")
            self._factors = (name, down, up)
        return self._factors[1:]


def open_base(adapter: StoredAdapter, given: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Opens the base of an adapter: the checkpoint that is given, or the recorded one.

    Raises:
        ConfigError: the adapter does not say what its base is, and none is given.
        CheckpointError: the base does not open.
    """
    path = given or adapter.base.path
    if not path:
        raise ConfigError(f"{adapter.checkpoint.path} does not say what its base is. Name that model: --base CKPT.")
    try:
        return Checkpoint.open(path)
    except CheckpointError as error:
        if given:
            raise
        raise CheckpointError(
            f"{adapter.checkpoint.path} was trained on {path}, which does not open: {error} Name the folder of that "
            "model: --base CKPT."
        ) from error


def base_config(adapter: StoredAdapter, given: str | os.PathLike[str] | None = None) -> ModelConfig:
    """Returns the shape of an adapter's base: by the config.json beside it, or by the base itself; see `open_base`."""
    checkpoint = adapter.checkpoint
    if given is None and CONFIG in checkpoint.folder.side_paths():
        return ModelConfig.from_json(checkpoint.config(), str(checkpoint.path / CONFIG))
    return stored_config(open_base(adapter, given))


def require_base(adapter: StoredAdapter, base: Checkpoint) -> bool:
    """Checks the identity of a base, which reads all of its weights unless it is known from an earlier time.

    Args:
        adapter: the one that has to fit.
        base: the checkpoint to be used as its base.

    Returns:
        Whether the adapter records an identity; a folder of peft has none.

    Raises:
        CheckpointError: the adapter was trained on other weights.
    """
    if not adapter.base.identity:
        return False
    check_base(adapter, base_identity(base, stored_config(base)), str(base.path))
    return True


def prepare_merge(
    adapter: StoredAdapter,
    base: Checkpoint,
    target: str | os.PathLike[str],
    *,
    plain: bool = False,
    force: bool = False,
) -> Prepared:
    """Plans the folder of a base with an adapter's changes; `.run()` writes it.

    Args:
        adapter: the one to be added.
        base: its base; see `require_base` for the check of its identity.
        target: the new folder.
        plain: whether to leave out tk's manifest, COMMIT and checksums.
        force: whether to replace a checkpoint at `target`.

    Raises:
        ShapeMismatch: the adapter is none of this base.
        CheckpointError: a value of the adapter is not finite, or its folder has another vocabulary.
        ConfigError: the target cannot be made.
    """
    spec, source = adapter.decoder(stored_config(base)), adapter.checkpoint
    prepared = prepare_export(base, target, plain=plain, force=force, apart=(source.path,))
    check_vocabulary(source, base)
    adapter.check_values()
    return replace(
        prepared,
        change=AdapterMerge(adapter, spec),
        side_files=merged_text_files(source, prepared.side_files),
        left_behind=(*prepared.left_behind, *source.folder.left_behind()),
    )
