"""`tk export`: writes a checkpoint as a folder of Hugging Face's libraries, or joins an adapter and its base."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import PATH, print_json
from .invocation import commands_for, note, suggest
from .reshard import name_left_behind, open_checkpoint, run_or_show

if TYPE_CHECKING:
    from ..checkpoint.convert.reshard import Prepared
    from ..checkpoint.read.reader import Checkpoint


@click.command(
    epilog="\b\nExamples:\n  tk export runs/demo/run exported --plain\n  tk export runs/sql adapter\n"
    "  tk export --merge runs/sql merged"
)
@click.argument("source", metavar="SRC", type=PATH)
@click.argument("target", metavar="DST", type=PATH)
@click.option("--plain", is_flag=True, help="Leave out tk's manifest, COMMIT and checksums.")
@click.option("--link", is_flag=True, help="Hard-link SRC's weight files, and copy their checksums without a check.")
@click.option("--merge", is_flag=True, help="Write the base of the adapter SRC, with the adapter added to its weights.")
@click.option("--base", metavar="CKPT", type=PATH, help="Base of the adapter SRC; default: the one that it records.")
@click.option("--dry-run", is_flag=True, help="Print the files that would be written, and stop.")
@click.option("--force", is_flag=True, help="Replace a checkpoint at DST, once the new one is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export(
    source: Path,
    target: Path,
    plain: bool,
    link: bool,
    merge: bool,
    base: Path | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the weights of SRC as the folder DST, which transformers and other readers of safetensors can load.

    Without --plain, DST is also a tk checkpoint with checksums.

    If SRC is an adapter, DST is a folder that peft loads; such a folder is plain anyway. With --merge SRC may be a
    folder of peft as well, and DST is a model: each sum W + scale B A is computed in fp32 and rounded to W's dtype, and
    the last line says how many weights kept their value because the change was rounded away.
    """
    from ..checkpoint import export_links, prepare_export

    checkpoint = open_checkpoint(source)
    if merge or checkpoint.manifest.adapter:
        if link:
            raise click.UsageError("--link cannot be combined with an adapter: its tensors get other names or values.")
        prepared = (
            _merge(checkpoint, target, base, plain, force) if merge else _adapter(checkpoint, target, base, force)
        )
        run_or_show(prepared, "export", dry_run, as_json)
        return
    if base:
        raise click.UsageError(f"--base is for adapters, and {checkpoint.path} holds a model.")
    if not link:
        run_or_show(prepare_export(checkpoint, target, plain=plain, force=force), "export", dry_run, as_json)
        return
    if plain or dry_run:
        raise click.UsageError(
            "--link cannot be combined with --plain or --dry-run: linked files keep tk's metadata in their headers."
        )
    name_left_behind(checkpoint.folder.left_behind())
    export_links(checkpoint, target, force=force)
    if as_json:
        print_json({"source": str(checkpoint.path), "target": str(target), "linked": True})
        return
    click.echo(f"{target}: checksums of linked files were copied without a check (tk verify {target} checks them)")
    suggest(*commands_for(target, target))


def _adapter(checkpoint: "Checkpoint", target: Path, base: Path | None, force: bool) -> "Prepared":
    """Returns the export of an adapter to peft. Its base is read only if the adapter has no config.json of it."""
    from ..model.adapter_export import prepare_peft_export
    from ..model.merged_adapter import base_config
    from ..model.stored_adapter import StoredAdapter

    adapter = StoredAdapter.of(checkpoint)
    config = base_config(adapter, base)
    return prepare_peft_export(adapter, config, target, base=str(base or ""), force=force)


def _merge(checkpoint: "Checkpoint", target: Path, given: Path | None, plain: bool, force: bool) -> "Prepared":
    """Returns the export of a base with an adapter's changes."""
    from ..checkpoint.format.adapter_record import CODES
    from ..model.merged_adapter import open_base, prepare_merge, require_base
    from ..model.stored_adapter import StoredAdapter

    adapter = StoredAdapter.of(checkpoint)
    base = open_base(adapter, given)
    if not require_base(adapter, base):
        note(
            f"unverified: {checkpoint.path} does not say which weights it was trained on; those of {base.path} "
            "are taken."
        )
    if adapter.base.weight_dtype in CODES:
        note(
            f"{checkpoint.path} was trained beside weights in {adapter.base.weight_dtype}, and is added to those "
            f"of {base.path} as they are stored, which differ from these by the rounding to codes."
        )
    return prepare_merge(adapter, base, target, plain=plain, force=force)
