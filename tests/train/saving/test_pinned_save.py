"""Saves from a GPU: copies to pinned memory of the writer on a stream of their own, awaited before the update."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tk.checkpoint import Checkpoint
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.pretended_memory import PretendedMemory
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer

WAIT = "parallel/streams.py wait: synchronizes the stream"


@pytest.fixture
def config(configure: Configure) -> dict[str, Any]:
    return configure(train={"steps": 3}, precision={"params": "bf16"}, checkpoint={"every": 1})


def values(folder: Path, step: int) -> dict[tuple[str, str], Any]:
    """Returns every slot of every tensor of a step."""
    checkpoint = Checkpoint.open(folder / f"step-{step:08}")
    return {(tensor, slot): checkpoint.read(tensor, slot=slot).numpy() for tensor, slot in checkpoint.chunks}


def test_a_save_waits_for_nothing_and_the_next_update_for_its_copies(config: dict[str, Any]) -> None:
    folder = Path(config["checkpoint"]["dir"])
    with pretend_gpu() as gpu:
        trainer = make_trainer(config, device=GPU)
        trainer.step()
        with trainer.checkpointer.open(trainer.save_options()) as run:
            run.saver.save(1, {}, wait=False)  # begins the writer and pins its memory
            trainer.step()
            before = len(gpu.waits)
            run.saver.save(2, {}, wait=False)
            assert gpu.waits[before:] == []
            trainer.step()
            assert gpu.waits[before:].count(WAIT) == 1
            assert len(gpu.waits) == before + 3, "a step itself waits twice"
        assert not [each for each in gpu.pageable if "saving" in each]
    assert {step for step in (1, 2) if (folder / f"step-{step:08}").exists()} == {1, 2}


def test_steps_are_those_that_are_saved_in_place(config: dict[str, Any], tmp_path: Path) -> None:
    for name, background in (("behind", True), ("in_place", False)):
        changed = config | {
            "checkpoint": {"dir": str(tmp_path / name), "every": 1, "keep": 0, "async_save": background}
        }
        with pretend_gpu() as gpu:
            make_trainer(changed, device=GPU).fit()
            assert gpu.waits.count(WAIT) == (2 if background else 0), "the last step is saved in place"
    for step in (1, 2, 3):
        one, two = (values(tmp_path / name, step) for name in ("behind", "in_place"))
        assert one.keys() == two.keys()
        assert all((one[key] == two[key]).all() for key in one)


def test_a_run_that_fails_after_a_save_still_writes_it(config: dict[str, Any]) -> None:
    with pretend_gpu():
        trainer = make_trainer(config, device=GPU)
        trainer.step()

        def failing() -> None:
            with trainer.checkpointer.open(trainer.save_options()) as run:
                run.saver.save(1, {}, wait=False)
                raise KeyError("the next step")

        with pytest.raises(KeyError):
            failing()
    assert Checkpoint.open(Path(config["checkpoint"]["dir"])).step == 1


def test_memory_that_cannot_be_pinned_is_copied_in_parts(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pin = PretendedMemory.cudaHostRegister

    def limited(memory: PretendedMemory, address: int, nbytes: int, flags: int) -> int:
        return pin(memory, address, nbytes, flags) if nbytes == 2**22 else 2

    monkeypatch.setattr(PretendedMemory, "cudaHostRegister", limited)
    with caplog.at_level(logging.WARNING), pretend_gpu() as gpu:
        make_trainer(config, device=GPU).fit()
        assert WAIT not in gpu.waits
        assert not gpu.memory.pinned or set(gpu.memory.pinned.values()) == {2**22}
    assert "CUDA cannot pin the" in caplog.text
    assert Checkpoint.open(Path(config["checkpoint"]["dir"])).verify().ok
