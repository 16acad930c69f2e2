"""Rewriting a checkpoint for another layout, weights and optimizer state, in memory that the model does not grow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.dtypes import DType
from ...core.errors import ConfigError, ShapeMismatch
from ...core.layout import Layout
from ...core.tensors import Table
from ..files import folders, small_files
from ..format.chunk import Part
from ..format.manifest import PARTS, FileDigest, Manifest, StoredTensor
from ..format.step_names import check_target_name
from ..read.reader import Checkpoint
from ..save.commit import hugging_face_index, seal
from ..save.writer import check_part, part_name, put_part
from .copy import run_copy
from .diff import equal_tensors
from .hard_links import HardLink, add_linked, make_links, require_checksums, split_off_links
from .plan import CopyPlan, plan_copy, select
from .side_files import SideFile, copy_side_files, plan_side_files
from .target import check_target, target_folder


@dataclass(frozen=True, slots=True)
class Options:
    """What the copy is to be.

    Attributes:
        layout: tp and pp of the target; data parallelism and ZeRO are facts of a run, so they stay 1 and 0.
        dtype: of the weights; None = as stored.
        plain: leave out manifest, COMMIT, parts and the mark in the files: a bare Hugging Face folder.
        force: replace a checkpoint that is at the target.
        link: hard-link files that would come out as they are; their checksums are carried over unread.
    """

    layout: Layout
    dtype: DType | None = None
    weights_only: bool = False
    plain: bool = False
    force: bool = False
    link: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A copy about to be made: everything but the bytes.

    Attributes:
        plan: what is copied.
        links: what is linked.
        side_files: what is taken along.
    """

    source: Checkpoint
    target: Path
    options: Options
    plan: CopyPlan
    manifest: Manifest
    links: tuple[HardLink, ...] = ()
    side_files: tuple[SideFile, ...] = ()

    def run(self, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
        """Makes the target folder; nothing of it is there before all of it is.

        Args:
            on_bytes: told how many bytes of the source are done, of `plan.bytes_read`.

        Raises:
            ShardCorrupt: the source is damaged; names tensor, file and block.
            TkError: there is no room for it.
            ConfigError: files cannot be linked where the target is.
        """
        num_bytes = self.plan.bytes_written + sum(file.size for file in self.side_files)
        with target_folder(self.target, self.source.path, self.options.force, num_bytes) as folder:
            make_links(self.links, self.source, folder)
            files = copy_side_files(self.side_files, folder)
            parts = add_linked(run_copy(self.plan, self.source, folder, on_bytes), self.links)
            finish_folder(folder, self.manifest, parts, files, self.options.plain)
        return self.target


def prepare_reshard(source: Checkpoint, target: str | Path, options: Options, table: Table | None = None) -> Prepared:
    """Plans a copy without touching the target.

    Args:
        table: the architecture's tensors, for a Hugging Face folder, which does not say how its tensors may be cut.

    Raises:
        ConfigError: the target is taken, or a Hugging Face folder is to be cut without a table, or linked.
        ParallelError: the layout does not fit a tensor.
        ShapeMismatch: the table's tensors are not the source's, or it ties two that are stored and differ.
        CheckpointError: there is no cast to the dtype, more tensors than a reader would accept, or a side file of the
            source that cannot be taken along.
    """
    check_target(Path(target), source.path, options.force)
    check_target_name(Path(target), None if options.plain else source.step)
    layout = options.layout
    if layout.dp > 1 or layout.zero:
        raise ConfigError("A reshard's target has no data parallelism or ZeRO: any run reads any checkpoint.")
    if table is None:
        if not source.folder.has_splits and layout.world_size > 1:
            raise ConfigError(
                f"{source.path} does not say how its tensors may be cut; its architecture's table is needed."
            )
        table, aliases = source.manifest.table, dict(source.aliases)
    else:
        aliases = {spec.name: spec.alias for spec in table if spec.alias}
        table = tuple(spec for spec in table if not spec.alias)
        _check_table(source, table, aliases)
    selections = select(source.tensors, [spec.name for spec in table], options.dtype, options.weights_only)
    plan, links = plan_copy(source.chunks, table, layout, selections, marked=not options.plain), tuple[HardLink, ...]()
    if options.link:
        require_checksums(source)
        plan, links = split_off_links(plan, source)
    slots: dict[str, dict[str, str]] = {spec.name: {} for spec in table}
    for chosen in selections:
        slots[chosen.tensor][chosen.slot] = chosen.target_dtype.code
    tensors = {spec.name: StoredTensor(spec.shape, slots[spec.name], spec.split, spec.layer) for spec in table}
    manifest = Manifest(source.step, layout, tensors, aliases)
    if not options.weights_only:
        manifest = replace(manifest, param_groups=source.manifest.param_groups, resume=source.resume)
    if not options.plain:
        _check_readable(manifest, plan)
    files = plan_side_files(source, options.dtype)
    return Prepared(source, Path(target), options, plan, manifest, links, files)


def reshard(
    source: str | Path,
    target: str | Path,
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


def finish_folder(
    folder: Path, manifest: Manifest, parts: list[Part], files: Mapping[str, FileDigest], plain: bool
) -> None:
    """Puts all but tensor data and side files into a folder, durably: parts, index, manifest and COMMIT.

    Args:
        files: the side files that are there already.
    """
    if plain:
        index = hugging_face_index(parts, {name: tensor.shape for name, tensor in manifest.tensors.items()})
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
                f"{source.path}: {name} should have shape {list(shape)} by its config.json; found {found}."
            )
    for alias, name in aliases.items():
        if alias in stored and not equal_tensors(source, alias, name):
            raise ShapeMismatch(
                f"{source.path} holds {alias}, which is not {name}, though its config.json ties the two; it would be "
                f"lost. Say tie_word_embeddings = false there."
            )
    unknown = sorted(stored - set(wanted) - set(aliases))
    if unknown:
        raise ShapeMismatch(
            f"{source.path} holds {unknown[0]}, which its architecture does not have; it would be lost."
        )
