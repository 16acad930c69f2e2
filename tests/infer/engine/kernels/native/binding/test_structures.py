"""The structures of ctypes have the sizes and offsets that the compiler gives those of model.h."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from tk.infer.engine.kernels.native.binding import structures
from tk.infer.engine.kernels.native.binding.library import SOURCE

PAIRS = {
    "matrix": structures.PackedMatrix,
    "up_factor": structures.PackedUpFactor,
    "adapter": structures.PackedAdapter,
    "vectors": structures.NormVectors,
    "operation": structures.PreparedOperation,
    "step": structures.StepArrays,
    "channel": structures.EngineChannel,
    "link": structures.RankLink,
    "sampling": structures.Sampling,
    "model": structures.NativeModel,
}
RENAMED = {"inputs": "in", "outputs": "out"}
CONSTANTS = (
    "PANEL",
    "BLOCK_ROWS",
    "BLOCK_COLUMNS",
    "MAX_RANKS",
    "ATTENTION_ROWS",
    "KEY_TILE",
    "KEY_SPLIT",
    "SHARED_ITEMS",
    "GROUP",
    "EXPERT_TOKENS",
    "MAX_PAIRS",
)


def _members() -> list[tuple[str, str, int]]:
    """Returns (structure, member, offset) as Python has them."""
    return [
        (name, RENAMED.get(field[0], field[0]), getattr(kind, field[0]).offset)
        for name, kind in PAIRS.items()
        for field in kind._fields_
    ]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_offsets_sizes_and_constants_are_those_of_the_compiler(tmp_path: Path) -> None:
    lines = [f'printf("%zu\\n", offsetof(struct {name}, {member}));' for name, member, _ in _members()]
    lines += [f'printf("%zu\\n", sizeof(struct {name}));' for name in PAIRS]
    enums = (structures.Format, structures.OperationKind, structures.Buffer)
    values = [(each.name, each.value) for enum in enums for each in enum]
    values += [(name, getattr(structures, name)) for name in CONSTANTS]
    lines += [f'printf("%d\\n", (int){name});' for name, _ in values]
    source = tmp_path / "offsets.c"
    source.write_text('#include <stdio.h>\n#include "model.h"\nint main(void) {\n' + "\n".join(lines) + "\n}\n")
    folder = SOURCE.units[0].source.parent
    subprocess.run(["cc", "-I", str(folder), str(source), "-o", str(tmp_path / "offsets")], check=True)
    printed = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.split()
    expected = [offset for _, _, offset in _members()]
    expected += [ctypes.sizeof(kind) for kind in PAIRS.values()]
    expected += [value for _, value in values]
    assert [int(each) for each in printed] == expected
