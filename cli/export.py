"""`tk export`: writes a checkpoint's weights as a Hugging Face folder."""

from pathlib import Path

import click

from .common import PATH, print_json
from .reshard import name_left_behind, open_checkpoint, run_or_show


@click.command(epilog="Example: tk export runs/demo exported --plain")
@click.argument("source", metavar="SRC", type=PATH)
@click.argument("target", metavar="DST", type=PATH)
@click.option("--plain", is_flag=True, help="Leave out tk's manifest, COMMIT and checksums.")
@click.option("--link", is_flag=True, help="Hard-link SRC's weight files, and copy their checksums without a check.")
@click.option("--dry-run", is_flag=True, help="Print the files that would be written, and stop.")
@click.option("--force", is_flag=True, help="Replace a checkpoint at DST, once the new one is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export(source: Path, target: Path, plain: bool, link: bool, dry_run: bool, force: bool, as_json: bool) -> None:
    """Write the weights of SRC as the folder DST, which transformers and other readers of safetensors can load.

    Without --plain, DST is also a tk checkpoint with checksums.
    """
    from ..checkpoint import export_links, prepare_export

    checkpoint = open_checkpoint(source)
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
