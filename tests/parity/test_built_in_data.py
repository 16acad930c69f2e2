"""The built-in subject is hard: ranks without a target, experts without a token or with all, a hot set that moves."""

import pytest
import torch

from tk.core.labels import IGNORED
from tk.data.batches import global_batch
from tk.parallel.mesh import Mesh
from tk.parity.layout import ParityLayout
from tk.parity.subject import Subject
from tk.train.context.dealing import deal
from tk.train.run.trainer import Trainer

STEPS = 10


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("subject")
    subject = Subject.built_in(folder, STEPS, "fp32")
    subject.prepare(folder)
    return subject


def trainer_of(subject: Subject, layout: ParityLayout) -> Trainer:
    """Returns the trainer of a layout's reference."""
    config = subject.reference(layout)
    trainer = Trainer(config, Mesh.alone(config.layout(1)))
    for stage in trainer.pipeline.stages:
        stage.record_routing = True
    return trainer


def targets_by_rank(subject: Subject, layout: ParityLayout) -> list[list[int]]:
    """Returns for each step the number of targets of each data- and context-parallel rank."""
    rows, trainer = subject.config(layout).train.global_batch_size, trainer_of(subject, layout)
    steps = []
    for step in range(STEPS):
        counts = []
        for rank in range(layout.dp):
            micro_batches = global_batch(trainer.inputs.train, step * rows, rows, rank, layout.dp, 2)
            for part in range(layout.cp):
                dealt = [
                    deal(2, 16, micro.documents, [None], layout.cp).take(part, micro.targets, IGNORED)
                    for micro in micro_batches
                ]
                counts.append(sum(int((targets != IGNORED).sum()) for targets in dealt))
        steps.append(counts)
    return steps


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_answers_leave_ranks_without_a_target(subject: Subject, axis: str, packing: str) -> None:
    layout = ParityLayout.model_validate({axis: 4, "targets": "answers", "packing": packing})
    steps = targets_by_rank(subject, layout)
    assert sum(steps[0]) > 0, "the first gradients are compared"
    lacking = [counts for counts in steps if 0 in counts and sum(counts) > 0]
    # Each row of packed documents has an answer, so a data-parallel rank with a row has a target.
    assert bool(lacking) == ((axis, packing) != ("dp", "documents"))


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 4}, {"seq_len": 15}], ids=["dp2", "dp4", "odd"])
def test_the_experts_in_use_move_and_get_all_tokens_or_none(subject: Subject, layout: dict[str, int]) -> None:
    trainer = trainer_of(subject, ParityLayout.model_validate(layout | {"experts": "glm4_moe"}))
    used: list[frozenset[int]] = []
    for _ in range(STEPS):
        counts_LE = torch.zeros(2, 8, dtype=torch.float64)
        num_tokens = trainer.step().num_tokens
        for stage in trainer.pipeline.stages:
            for balance in stage.balances:
                balance.add_counts(counts_LE)
        assert counts_LE[1].sum() == 2 * num_tokens
        used.append(frozenset(counts_LE[1].nonzero().flatten().tolist()))
    assert min(map(len, used)) == 2, "all tokens take the same two experts"
    assert len(set(used)) >= 4, "they move"
