"""The jobs of one rank: a reference and its file, a layout compared with it, and the process groups kept in between."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tk.core.config import parse
from tk.core.errors import TkError
from tk.parallel.mesh import Mesh
from tk.parity import measure
from tk.parity.flat_values import square_norms
from tk.parity.layout import ParityLayout
from tk.parity.measure import Measurer, ParityTrainer, run_layout, run_reference
from tk.parity.reference_values import ReferenceValues
from tk.parity.subject import VOCAB_SIZE, Subject
from tk.tests.parity.broken_rank import no_partial
from tk.tests.rank_pool import RankPool
from tk.train.config.initial_model import resolve
from tk.train.config.run_decoder import run_decoder
from tk.train.config.train_config import TrainConfig
from tk.train.engine.nonfinite import NonFinitePolicy
from tk.train.state.progress import StepResult
from tk.train.zero.gradient_exchange import GradientExchange

STEPS = 2


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("subject")
    subject = Subject.built_in(folder, STEPS, "fp32")
    subject.prepare(folder)
    return subject


@pytest.fixture
def measurer() -> Iterator[Measurer]:
    """A measurer in this process, which has the group of its last job."""
    threads = torch.get_num_threads()
    yield Measurer()
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def job(config: TrainConfig, values: Path, store: Path, reference: bool = False) -> dict[str, Any]:
    """Returns a job of one rank, as the pool sends it."""
    payload = {"config": config.model_dump(mode="json"), "values": str(values)}
    return {
        "payload": payload | {"reference": reference, "foreign": False, "skipped_step": 0},
        "num_ranks": 1,
        "rank": 0,
        "store": str(store),
    }


def test_a_layout_is_compared_with_the_file_of_the_reference(
    measurer: Measurer, subject: Subject, tmp_path: Path
) -> None:
    said: list[Mapping[str, Any]] = []
    config, file = subject.config(ParityLayout(tied=False)), tmp_path / "gradients.npy"
    reference = measurer(job(config, tmp_path, tmp_path / "unused", reference=True), said.append)
    assert reference.pop("close") == [0] * STEPS
    assert not dist.is_initialized(), "a reference needs no other process"
    assert said == [{"step": 1}, {"step": 2}]
    assert set(reference) == {"loss", "grad_norm", "routing"}
    assert [len(curve) for curve in reference.values()] == [STEPS] * 3
    assert reference["loss"][0] > reference["loss"][1] > 0
    assert reference["routing"] == [0.0] * STEPS, "a model without experts routes nothing"

    same = measurer(job(config, tmp_path, tmp_path / "store"), said.append)
    assert {name: same[name] for name in reference} == reference
    assert (same["gradients"], same["updates"]) == (0, 0)

    changed = np.load(file)
    changed[0] += 1
    np.save(file, changed)
    other = measurer(job(config, tmp_path, tmp_path / "store"), said.append)
    assert other["loss"] == reference["loss"]
    assert (other["parameter"], other["gradients"] > 0.1) == ("model.embed_tokens.weight", True)
    assert other["updates"] == 0


def test_a_group_is_kept_for_jobs_with_the_same_store_only(
    measurer: Measurer, subject: Subject, tmp_path: Path
) -> None:
    config = subject.config(ParityLayout(tied=False))
    measurer(job(config, tmp_path, tmp_path / "unused", reference=True), lambda message: None)
    meshes = []
    for store in ("one", "one", "two"):
        measurer(job(config, tmp_path, tmp_path / store), lambda message: None)
        meshes.append(measurer.mesh)
    assert meshes[0] is meshes[1]
    assert meshes[2] is not meshes[0]


def test_routing_is_that_of_the_experts(subject: Subject, tmp_path: Path) -> None:
    data = subject.config(ParityLayout(tied=False)).model_dump(mode="json")
    data["model"] |= {"architecture": "mixtral", "num_local_experts": 4}
    curves = []
    for seed in (0, 0, 1):
        data["train"]["seed"] = seed
        config = parse(data, TrainConfig, "test")
        curves.append(run_reference(config, ReferenceValues(tmp_path, STEPS), lambda message: None)["routing"])
    assert min(curves[0]) > 0
    assert curves[0] == curves[1] != curves[2]


def without_sums(config: dict[str, Any], values: str) -> list[tuple[float, str]]:
    """Returns what is found of a layout as it is, and then with broken_rank.py's defect.

    Replicas that differ over ranks drift apart, which is an error; before that their gradients are only a part of the
    right ones.
    """
    parsed = parse(config, TrainConfig, "test")
    mesh = Mesh.build(parsed.layout(2), parsed.model.num_key_value_heads)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for stand_in in (GradientExchange._partial, no_partial):
            patch.setattr(GradientExchange, "_partial", stand_in)
            try:
                result = run_layout(parsed, mesh, ReferenceValues(Path(values), STEPS), lambda message: None)
                found.append((result["gradients"], result["parameter"]))
            except TkError as error:
                found.append((1.0, str(error)))
    return found


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        (ParityLayout(tp=2, sequence_parallel=True, tied=False), "norm"),
        (ParityLayout(tp=2, tied=False, lora="all-linear"), "lora"),
    ],
    ids=["norms", "adapters"],
)
def test_replicas_without_the_sums_over_ranks_are_seen(
    rank_pool: RankPool, subject: Subject, tmp_path: Path, layout: ParityLayout, where: str
) -> None:
    values = ReferenceValues(tmp_path, STEPS)
    run_reference(subject.reference(layout), values, lambda message: None)
    config = subject.config(layout).model_dump(mode="json")
    for right, wrong in rank_pool.run(without_sums, 2, config=config, values=str(tmp_path)):
        assert right[0] <= 1e-5 < wrong[0]
        assert where in wrong[1]


def test_the_first_gradients_of_both_factors_of_adapters_are_compared(subject: Subject, tmp_path: Path) -> None:
    config = subject.config(ParityLayout(tied=False, lora="all-linear"))
    values = ReferenceValues(tmp_path, STEPS)
    run_reference(config, values, lambda message: None)
    table = run_decoder(config, resolve(config, "never").complete(VOCAB_SIZE, (), "fp32")).table
    norms = square_norms(np.load(values.gradients), table)
    assert {name.split(".")[-2] for name in norms} == {"lora_A", "lora_B"}
    assert min(norms.values()) > 0


class Drifting(ParityTrainer):
    """A trainer whose replicas drift apart: rank 1 changes a weight after every step."""

    def step(self) -> StepResult:
        result = super().step()
        if self.mesh.world.rank == 1:
            with torch.no_grad():
                next(self.stages[0].parameters()).add_(1e-6)
        return result


def drift(config: dict[str, Any], values: str) -> list[str]:
    """Returns the errors of a layout of two replicas, first as it is and then with drifting replicas; "" for none."""
    parsed = parse(config, TrainConfig, "test")
    mesh = Mesh.build(parsed.layout(2), parsed.model.num_key_value_heads)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (ParityTrainer, Drifting):
            patch.setattr(measure, "ParityTrainer", kind)
            try:
                run_layout(parsed, mesh, ReferenceValues(Path(values), STEPS), lambda message: None)
                errors.append("")
            except TkError as error:
                errors.append(str(error))
    return errors


def test_replicas_that_drift_apart_are_an_error(rank_pool: RankPool, subject: Subject, tmp_path: Path) -> None:
    layout, values = ParityLayout(dp=2, tied=False), ReferenceValues(tmp_path, STEPS)
    run_reference(subject.reference(layout), values, lambda message: None)
    config = subject.config(layout).model_dump(mode="json")
    for right, wrong in rank_pool.run(drift, 2, config=config, values=str(tmp_path)):
        assert right == ""
        assert "model.embed_tokens.weight" in wrong


def test_a_step_with_infinite_gradients_changes_no_weight(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = subject.config(ParityLayout(tied=False))
    weights, curves = [], []
    for name, weights_after, skipped_step in (("one", 1, 0), ("skipped", 2, 2)):
        (tmp_path / name).mkdir()
        values = ReferenceValues(tmp_path / name, weights_after)
        curves.append(run_reference(config, values, lambda message: None, skipped_step))
        weights.append(np.load(values.weights))
    assert np.array_equal(*weights)
    one, skipped = curves
    for name in ("loss", "grad_norm"):
        assert skipped[name] == [one[name][0], 0.0]
    assert min(one["grad_norm"]) > config.optimizer.grad_clip, "every step is clipped"
    monkeypatch.setattr(NonFinitePolicy, "allows", lambda *arguments: True)
    with pytest.raises(TkError, match="Step 2 has infinite gradients, and updated parameters"):
        run_reference(config, ReferenceValues(tmp_path, 2), lambda message: None, 2)
