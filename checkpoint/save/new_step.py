"""A step to be committed: all its metadata, without the values that the ranks write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.layout import Layout
from ...core.tensors import Table
from ..format.adapter_record import AdapterRecord
from ..format.manifest import Manifest, StoredTensor


@dataclass(frozen=True, slots=True)
class NewStep:
    """The metadata of a step to be committed.

    Attributes:
        step: the training step.
        table: the model's tensors, each with its slots.
        layout: the layout that saves the step.
        param_groups: the optimizer's groups, each with "params", a list of tensor names.
        resume: the state of the run, independent of the layout; plain JSON.
        side_files: the content of config.json, tokenizer.json and other side files, by name.
        adapter: the record of the adapter, if the step is one.
    """

    step: int
    table: Table
    layout: Layout
    param_groups: Sequence[Mapping[str, Any]] = ()
    resume: Mapping[str, Any] = field(default_factory=dict)
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    adapter: AdapterRecord | None = None

    def manifest(self) -> Manifest:
        """Returns the step's manifest, without the digests of files and parts."""
        table = [spec for spec in self.table if spec.stored]
        stored = {spec.name: StoredTensor.of(spec) for spec in table if not spec.alias}
        aliases = {spec.name: spec.alias for spec in table if spec.alias}
        groups = tuple(self.param_groups)
        return Manifest(self.step, self.layout, stored, aliases, groups, self.resume, adapter=self.adapter)
