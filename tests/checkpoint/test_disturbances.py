"""Other programs write, replace and remove files while ours read them: the right bytes come out, or a refusal."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint, Options, prepare_export, prepare_reshard
from tk.checkpoint.convert.reshard import Prepared
from tk.core.errors import CheckpointError, TkError
from tk.core.layout import Layout
from tk.tests.checkpoint.disturbances import (
    DISTURBANCES,
    OPERATIONS,
    Disturbance,
    Values,
    at_every_call,
    delete,
    disturbed,
    make_model,
    outcome,
    overwrite,
    overwrite_last_shard,
    replace_files,
    truncate,
    values_in,
)
from tk.tests.checkpoint.saving import llama_table, save_step

SOME = [(operation, overwrite, 7) for operation in OPERATIONS] + [
    ("export", each, 1 if each is overwrite_last_shard else 11) for each in DISTURBANCES
]
CASES = [pytest.param(*each, id=f"{each[0]}, {each[1].__name__}") for each in SOME] + [
    pytest.param(operation, each, 1, marks=pytest.mark.matrix, id=f"{operation}, {each.__name__}, all")
    for operation in OPERATIONS
    for each in DISTURBANCES
]


@pytest.mark.parametrize(("operation", "disturbance", "stride"), CASES)
def test_a_source_that_changes_while_it_is_read_is_whole_or_refused(
    tmp_path: Path, operation: str, disturbance: Disturbance, stride: int
) -> None:
    endings = list[bool]()
    for ended, place in at_every_call(tmp_path, operation, disturbance, stride):
        if isinstance(ended, TkError):
            assert {path.name for path in place.iterdir()} <= {"source", "new", "copy", "away"}
        else:
            states = [values_in(place / "copy")]
            if disturbance not in (truncate, delete):
                states.append(values_in(place / "source"))
            of_one = [{name: state[name] for name in ended} for state in states]
            assert ended in of_one, f"{ended} before call {len(endings) * stride}"
        endings.append(isinstance(ended, TkError))
    assert any(endings), "it is refused in the middle"
    assert len(endings) >= 3


def test_the_refusal_names_the_file(tmp_path: Path) -> None:
    source, new = make_model(tmp_path / "source", 1.0), make_model(tmp_path / "new", 2.0)
    job = prepare_export(Checkpoint.open(source), tmp_path / "target", plain=True)
    with (
        disturbed(3, lambda: overwrite(source, new)),
        pytest.raises(CheckpointError, match=r"source/\S+ was .*changed"),
    ):
        job.run()


def run_linked(job: Prepared) -> Values:
    job.run()
    return {}


@pytest.mark.parametrize("disturbance", [overwrite, replace_files])
def test_a_link_is_never_made_under_checksums_of_other_bytes(tmp_path: Path, disturbance: Disturbance) -> None:
    """A step is exported by links; before each call its file gets other values, under an equal header."""
    good = save_step(tmp_path / "good", llama_table(layers=1), Layout(), {"weight": "F32"})
    other = tmp_path / "other"
    other.mkdir()
    data = bytearray((good / "model-00000.safetensors").read_bytes())
    data[-64:] = bytes(64)
    (other / "model-00000.safetensors").write_bytes(data)
    endings = []
    for at in range(200):
        step = Path(shutil.copytree(good, tmp_path / str(at) / good.name))
        job = prepare_reshard(Checkpoint.open(step), step.parent / "target", Options(Layout(), link=True))
        with disturbed(at, partial(disturbance, step, other)) as made:
            ended = outcome(partial(run_linked, job))
        if made[0] <= at:
            break
        target = step.parent / "target"
        endings.append(isinstance(ended, TkError))
        assert not target.exists() if endings[-1] else Checkpoint.open(target).verify().ok or disturbance is overwrite
        shutil.rmtree(step.parent)
    assert endings == sorted(endings, reverse=True), "until the last check it is refused"
    assert any(endings)
