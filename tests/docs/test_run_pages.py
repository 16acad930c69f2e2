"""The blocks of pages, run as a reader runs them, each in its own copy of a folder with what `tk demo` leaves."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tk.tests.docs.blocks import Block, all_blocks
from tk.tests.docs.world import World, script_of

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(900)]
BLOCKS: Final = [
    replace(block, kind="sh", code=block.script) if block.script else block
    for block in all_blocks()
    if (block.script or block.kind == "python") and block.mark is None and block.run_by is None
]


@pytest.mark.parametrize("block", BLOCKS, ids=map(str, BLOCKS))
def test_a_block_runs(world: World, tmp_path: Path, block: Block) -> None:
    with world.copy(tmp_path / "copy") as place:
        place.run(script_of(block))
