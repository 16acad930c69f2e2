"""Rewrites of a checkpoint for another layout, with optimizer state, in memory that does not grow with the model."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.dtypes import DType
from ...core.errors import ConfigError, ShapeMismatch
from ...core.garbage import no_garbage_collection
from ...core.given_paths import as_path
from ...core.layout import Layout
from ...core.tensors import Table
from ..files import folders, small_files
from ..format.chunk import Part
from ..format.manifest import PARTS, FileDigest, Manifest, StoredTensor
from ..format.step_names import check_target_name
from ..read.reader import Checkpoint
from ..save.seal import hugging_face_index, seal
from ..save.writer import check_part, part_name, put_part
from .copy import TileChange, run_copy
from .hard_links import HardLink, add_linked, make_links, require_checksums, require_unchanged, split_off_links
from .identity import carry_identity
from .plan import CopyPlan, plan_copy, select, with_selected
from .side_files import SideFile, copy_side_files, plan_side_files
from .target import CopyTarget
from .tensor_values import equal_tensors


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a copy.

    Attributes:
        layout: tp and pp of the target; other axes are 1 and ZeRO is 0, because a run of any layout reads the target.
        dtype: the dtype of the target's weights; None = as stored.
        weights_only: whether to leave out optimizer and resume state.
        plain: whether to make a plain Hugging Face folder, without manifest, COMMIT, parts and the mark in the files.
        force: whether to replace a checkpoint at the target.
        link: whether to hard-link files that would be equal; their checksums are copied without reading the files.
        apart: folders that the copy reads beside the source; the target must not be one of them.
    """

    layout: Layout
    dtype: DType | None = None
    weights_only: bool = False
    plain: bool = False
    force: bool = False
    link: bool = False
    apart: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planned copy, ready to run.

    Attributes:
        source: the checkpoint to copy from.
        target: the new folder.
        options: the options of the copy.
        plan: the data to copy.
        manifest: the target's metadata.
        links: the files to link.
        side_files: the side files to copy.
        left_behind: the names in the source's folder that are not copied, hidden ones excepted.
        change: a change of the values; None = they are copied.
    """

    source: Checkpoint
    target: CopyTarget
    options: Options
    plan: CopyPlan
    manifest: Manifest
    links: tuple[HardLink, ...] = ()
    side_files: tuple[SideFile, ...] = ()
    left_behind: tuple[str, ...] = ()
    change: TileChange | None = None

    def run(self, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
        """Makes the target folder, which appears under its name only when it is complete.

        Args:
            on_bytes: called with the number of source bytes copied since the last call; `plan.bytes_read` in all.

        Raises:
            ShardCorrupt: the source is damaged; the message names tensor, file and block.
            CheckpointError: a file of the source was changed while it was read or linked.
            TkError: the disk has no room for the target.
            ConfigError: files cannot be linked in the target's file system.
        """
        num_bytes = self.plan.bytes_written + sum(file.size for file in self.side_files)
        with self.target.new_folder(num_bytes) as folder:
            make_links(self.links, self.source, folder)
            files = copy_side_files(self.side_files, folder)
            parts = add_linked(run_copy(self.plan, self.source, folder, on_bytes, change=self.change), self.links)
            self.source.folder.require_unchanged()
            if self.change:
                self.change.require_unchanged()
            require_unchanged(self.links, folder)
            finish_folder(folder, self.manifest, parts, files, self.options.plain)
        if self.change is None:
            carry_identity(self.source, self.target.path, self.manifest.tensors)
        return self.target.path


@no_garbage_collection()
def prepare_reshard(
    source: Checkpoint, target: str | os.PathLike[str], options: Options, table: Table | None = None
) -> Prepared:
    """Plans a copy without touching the target.

    Args:
        source: the checkpoint to copy.
        target: the new folder.
        options: the options of the copy.
        table: the architecture's tensors; needed for a Hugging Face folder, which does not record how tensors are cut.

    Raises:
        ConfigError: the target exists, or the source is a Hugging Face folder and is to be cut without a table or
            linked.
        ParallelError: the layout does not fit a tensor.
        ShapeMismatch: the table's tensors are not the source's, or it ties two stored tensors that differ.
        CheckpointError: a tensor has no cast to the dtype, the target would have more tensors than readers accept, or a
            side file of the source cannot be copied.
    """
    checked = CopyTarget(as_path(target), source, options.force, options.apart)
    checked.check()
    check_target_name(checked.path, None if options.plain else source.step)
    layout = options.layout
    if layout.data > 1 or layout.ep > 1 or layout.expert_tp or layout.zero:
        raise ConfigError(
            "A reshard's target has no data, context or expert parallelism and no ZeRO stage; give tp and pp only. Any "
            "run reads any checkpoint."
        )
    if table is None:
        if not source.folder.has_splits and layout.world_size > 1:
            raise ConfigError(
                f"{source.path} does not record how its tensors may be cut; pass its architecture's table."
            )
        table, aliases = source.manifest.table, dict(source.aliases)
    else:
        aliases = {spec.name: spec.alias for spec in table if spec.alias}
        table = tuple(spec for spec in table if not spec.alias)
        _check_table(source, table, aliases)
    selections = select(source.tensors, [spec.name for spec in table], options.dtype, options.weights_only)
    table = with_selected(table, selections)
    plan, links = plan_copy(source.chunks, table, layout, selections, marked=not options.plain), tuple[HardLink, ...]()
    if options.link:
        require_checksums(source)
        plan, links = split_off_links(plan, source)
    stored = {spec.name: StoredTensor.of(spec) for spec in table}
    manifest = Manifest(source.step, layout, stored, aliases, adapter=source.manifest.adapter)
    if not options.weights_only:
        manifest = replace(manifest, param_groups=source.manifest.param_groups, resume=source.resume)
    if not options.plain:
        _check_readable(manifest, plan)
    files = plan_side_files(source, options.dtype)
    left_behind = tuple(source.folder.left_behind())
    return Prepared(source, checked, options, plan, manifest, links, files, left_behind)


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: Layout,
    dtype: DType | None = None,
    weights_only: bool = False,
    force: bool = False,
    table: Table | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Path:
    """Writes `source` (any CKPT) at `layout` as the new step folder `target`: `prepare_reshard` and `run` in one."""
    options = Options(layout, dtype, weights_only, force=force)
    return prepare_reshard(Checkpoint.open(source), target, options, table).run(on_bytes)


@no_garbage_collection()
def finish_folder(
    folder: Path, manifest: Manifest, parts: list[Part], files: Mapping[str, FileDigest], plain: bool
) -> None:
    """Writes parts, index, manifest and COMMIT into a folder that holds the tensor data and side files; durable.

    Args:
        folder: the folder to finish.
        manifest: the metadata.
        parts: the part of each writer.
        files: the digests of the side files in the folder.
        plain: whether to write the index only, and none of an adapter.
    """
    if plain:
        shapes = {name: tensor.shape for name, tensor in manifest.tensors.items()}
        index = {} if manifest.adapter else hugging_face_index(parts, shapes)
        for name, data in index.items():
            small_files.write_small(folder / name, data)
        folders.fsync_dir(folder)
        return
    folders.make_dirs(folder / PARTS)
    for part in parts:
        put_part(folder, part)
    seal(folder, replace(manifest, files=files), {part_name(part.writer): part.to_bytes() for part in parts}, {})


def _check_readable(manifest: Manifest, plan: CopyPlan) -> None:
    for writer, files in enumerate(plan.files):
        check_part(writer, files)
    manifest.check_size(sum(len(file.entries) for files in plan.files for file in files))


def _check_table(source: Checkpoint, table: Table, aliases: dict[str, str]) -> None:
    wanted = {spec.name: spec.shape for spec in table}
    stored = {name for name, _ in source.chunks}
    for name, shape in wanted.items():
        if name not in stored or source.tensors[name].shape != shape:
            found = list(source.tensors[name].shape) if name in stored else "none"
            raise ShapeMismatch(
                f"{source.path}: {name} should have shape {list(shape)} by its config.json; found {found}. Correct "
                "config.json, or use the weights that belong to it."
            )
    for alias, name in aliases.items():
        if alias in stored and not equal_tensors(source, alias, name):
            raise ShapeMismatch(
                f"{source.path} holds {alias}, which is not equal to {name}, though its config.json ties the two; it "
                f'would be lost. Set "tie_word_embeddings": false in config.json to keep it.'
            )
    unknown = sorted(stored - set(wanted) - set(aliases))
    if unknown:
        raise ShapeMismatch(
            f"{source.path} holds {unknown[0]}, which its architecture does not have, so it would be lost. Remove it "
            "from the weights, or correct the architecture in config.json."
        )
