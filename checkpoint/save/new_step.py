"""A step to be committed: all that a checkpoint holds beside the values that its ranks write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.layout import Layout
from ...core.tensors import Table
from ..format.manifest import Manifest, StoredTensor


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step by its number, and its tensors by name, dtype and layout.

    Attributes:
        slots: dtype code of each slot of an ordinary tensor: {"weight": "BF16", "exp_avg": "F32", ...}.
        param_groups: the optimizer's groups, each with "params", a list of tensor names.
        resume: layout-free state of the run; plain JSON.
        side_files: config.json, tokenizer.json and such.
    """

    step: int
    table: Table
    layout: Layout
    slots: Mapping[str, str]
    param_groups: Sequence[Mapping[str, Any]] = ()
    resume: Mapping[str, Any] = field(default_factory=dict)
    side_files: Mapping[str, bytes] = field(default_factory=dict)

    def manifest(self) -> Manifest:
        """The step's manifest, without digests of files and parts."""
        stored = {
            spec.name: StoredTensor(spec.shape, spec.codes(self.slots), spec.split, spec.layer)
            for spec in self.table
            if not spec.alias
        }
        aliases = {spec.name: spec.alias for spec in self.table if spec.alias}
        return Manifest(self.step, self.layout, stored, aliases, tuple(self.param_groups), self.resume)
