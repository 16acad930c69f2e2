"""The copy engine: the same files whatever the size of a tile, and no byte unchecked."""

from pathlib import Path

from tk.checkpoint import Checkpoint, Options, prepare_reshard
from tk.checkpoint.convert.copy import run_copy
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import llama_table, save_step


def test_tiny_tiles_write_the_same_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_step(tmp_path / "run", llama_table(layers=2), Layout(tp=4, dp=2, zero=1)))
    plan = prepare_reshard(checkpoint, tmp_path / "new", Options(Layout(tp=2))).plan
    folders = [tmp_path / "tiny", tmp_path / "usual"]
    parts = []
    for folder, tile_bytes in zip(folders, (64, 2**22), strict=True):
        folder.mkdir()
        done: list[int] = []
        parts.append(run_copy(plan, checkpoint, folder, done.append, tile_bytes))
        assert sum(done) == plan.bytes_read
    assert parts[0] == parts[1]
    for name in parts[0][0].files:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
