"""What users do between the calls of an engine: it ends as in plain PyTorch, to the bit or nearly, or in an error."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import TkError
from tk.tests.rank_pool import RankPool
from tk.tests.train.foreign.between_calls import DTYPES, Loop, Ours, Plain
from tk.tests.train.foreign.script import ALL, Script, turn
from tk.tests.train.foreign.scripts_of_parameters import OF_PARAMETERS
from tk.tests.train.foreign.scripts_of_passes import OF_PASSES

PAGE = Path(__file__).parents[3] / "docs" / "foreign-modules.md"
SCRIPTS = OF_PARAMETERS | OF_PASSES
HEAVY = "`module.compile()`"  # its compiler takes seconds to import


def _cases() -> list[Any]:
    """Every script at every stage and precision; `make test` runs each script twice: all pairs of values are in it."""
    cases = []
    for row, name in enumerate(SCRIPTS):
        chosen = {(stage % 4, tuple(DTYPES)[(row // 4 + stage) % 3]) for stage in (row, row + 2)}
        for stage, precision in product(ALL, DTYPES):
            marks = () if (stage, precision) in chosen and name != HEAVY else (pytest.mark.matrix,)
            cases.append(pytest.param(name, stage, precision, marks=marks, id=f"{name}-{stage}-{precision}"))
    return cases


def _run(loop: Loop, script: Script, folder: Path) -> dict[str, torch.Tensor]:
    script.run(loop, folder)
    for number in range(script.accumulate):
        turn(loop, 10 + number)
    return loop.state()


def check(name: str, stage: int, precision: str, folder: Path) -> Ours:
    """Runs a script on both loops; on several ranks, which see the same data, the plain one is each rank's own.

    Returns:
        Our loop, which other ranks may still send to.
    """
    script = SCRIPTS[name]
    ours = Ours(precision, stage, script.accumulate)
    if script.refused and stage in script.stages:
        with pytest.raises((TkError, RuntimeError, AttributeError), match=script.refused):
            script.run(ours, folder)
        return ours
    found = _run(ours, script, folder)
    expected = _run(Plain(precision, stage, script.accumulate), script, folder)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=2e-6, atol=2e-7, msg=key)
    return ours


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it while it traces hooks
@pytest.mark.parametrize(("name", "stage", "precision"), _cases())
def test_as_torch_or_refused(tmp_path: Path, name: str, stage: int, precision: str) -> None:
    check(name, stage, precision, tmp_path)


def check_on_ranks(names: list[str], stage: int, precision: str, folder: str) -> None:
    for number, name in enumerate(names):
        ours = check(name, stage, precision, Path(folder) / str(number))
        dist.barrier()  # a rank that is refused first must not be gone when the others' last messages come
        del ours


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.matrix), "bf16"])
@pytest.mark.parametrize("stage", ALL)
def test_on_two_ranks(rank_pool: RankPool, tmp_path: Path, stage: int, precision: str) -> None:
    """In bf16 every eighth script at each stage; in fp32 all scripts."""
    names = [name for name in SCRIPTS if name != HEAVY]
    rank_pool.run(
        check_on_ranks,
        2,
        names=names[stage::8] if precision == "bf16" else names,
        stage=stage,
        precision=precision,
        folder=str(tmp_path),
    )


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("stage", ALL)
def test_a_write_is_saved_as_state_dict_shows_it(tmp_path: Path, stage: int, precision: str) -> None:
    """It was lost at the next update, and `save` did not have it in the masters."""
    ours = Ours(precision, stage, 1)
    turn(ours, 1)
    with ours.whole():
        ours.module.head.weight.data[1] = 0.3
    ours.save(tmp_path)
    saved, shown = Checkpoint.open(tmp_path), ours.state()["head.weight"]
    assert (shown[1] == torch.tensor(0.3).to(ours.dtype)).all()
    assert torch.equal(saved.read("head.weight").torch(), shown)
    if precision != "fp32":
        assert torch.equal(saved.read("head.weight", slot="master").torch().to(ours.dtype), shown)


def test_the_page_has_the_table() -> None:
    lines = [f"| {name} | {script.outcome} |" for name, script in SCRIPTS.items()]
    written = [line for line in PAGE.read_text().splitlines() if line in set(lines)]
    assert written == lines, "docs/foreign-modules.md lacks rows; they are:\n" + "\n".join(lines)
