"""Offload at many layouts: on a CPU every run has the bits of the same layout with everything on the device."""

import hashlib
import math
from collections.abc import Iterable
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.core.config import parse
from tk.parallel.mesh import Mesh
from tk.parity.axes import AXES, FOREIGN_AXES, OFFLOAD_AXES
from tk.parity.covering import covering_rows
from tk.parity.foreign import make_module, micro_batch
from tk.parity.layout import ParityLayout
from tk.parity.matrix import LayoutSpace
from tk.parity.subject import MICRO_BATCHES, SKIPPED_STEP, Subject
from tk.tests.rank_pool import RankPool
from tk.train.config.train_config import TrainConfig
from tk.train.engine.training_engine import TrainingEngine
from tk.train.foreign.model_engine import initialize
from tk.train.run.trainer import Trainer

STEPS = 5
NUM_RANKS = 4
CHOSEN = [
    (
        ParityLayout(
            dp=2, zero=3, tied=True, offload_optimizer="disk", offload_gradients="disk", offload_parameters="disk"
        ),
        "bf16",
    ),
    (
        ParityLayout(
            pp=2,
            schedule="interleaved",
            num_virtual_stages=2,
            tied=True,
            offload_optimizer="cpu",
            offload_activations="cpu",
        ),
        "fp16",
    ),
    (
        ParityLayout(
            dp=2, zero=3, offload_optimizer="cpu", offload_gradients="disk", offload_activations="cpu", foreign=True
        ),
        "fp32",
    ),
    (ParityLayout(dp=2, zero=1, offload_optimizer="disk", offload_gradients="cpu", foreign=True), "fp16"),
]


def all_pairs() -> list[ParityLayout]:
    """Returns offloaded layouts of up to four ranks in which any two values of any two axes meet."""
    subject, layouts = Subject.built_in(Path("nothing is written"), STEPS, "fp32"), []
    values = {name: axis.values for name, axis in AXES.items()}
    values["offload_optimizer"] = ("cpu", "disk")
    for foreign in (False, True):
        axes = {axis: values[axis] for axis in (FOREIGN_AXES if foreign else values)}
        space = LayoutSpace(subject, NUM_RANKS, axes, foreign)
        layouts += [space.layout(row) for row in covering_rows(space, combinations(axes, 2))]
    return layouts


class Digest:
    """A checksum of all bits of an engine's steps."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *numbers: float) -> None:
        """Adds numbers."""
        self._hash.update(repr(numbers).encode())

    def of(self, engine: TrainingEngine) -> str:
        """Returns the checksum of what was added, of the states that this rank updates, and of whole parameters."""
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            for _, values in engine.optimizer.runs(slot):
                self._hash.update(values.contiguous().view(torch.uint8).numpy().tobytes())
        with engine.whole_parameters():
            for bucket in engine.buffers.buckets:
                for parameter in bucket.parameters:
                    self._hash.update(parameter.detach().to(torch.float32, copy=True).numpy().tobytes())
        return self._hash.hexdigest()


def train(config: TrainConfig, num_ranks: int) -> tuple[str, int]:
    """Trains a decoder as a rank; returns a checksum of its bits, and the number of updates."""
    mesh = Mesh.build(config.layout(num_ranks), config.model.num_key_value_heads, config.model.tie_word_embeddings)
    trainer, digest = Trainer(config, mesh), Digest()
    scale = trainer.engine.loss_scale
    with closing(trainer.engine.optimizer):
        for step in range(1, STEPS + 1):
            before, scale.value = scale.value, math.inf if step == SKIPPED_STEP else scale.value
            result = trainer.step()
            scale.value = before
            digest.add(result.loss, result.grad_norm, result.updated)
        return digest.of(trainer.engine), trainer.engine.optimizer.step_count


def train_foreign(config: TrainConfig, num_ranks: int) -> tuple[str, int]:
    """Trains a foreign module as a rank; returns a checksum of its bits, and the number of updates.

    The loss scale of fp16 overflows in the first step. A micro-batch is discarded midway.
    """
    engine = initialize(
        make_module(0),
        config.optimizer,
        zero=config.zero.stage,
        precision=config.precision.params,
        accumulate=MICRO_BATCHES // num_ranks,
        steps=STEPS,
        shard_size=config.zero.shard_size,
        bucket_size=config.zero.bucket_size,
        offload=config.offload.model_dump(),
    )
    inner, digest = engine._engine, Digest()
    with closing(inner.optimizer):
        for step in range(1, STEPS + 1):
            if step == SKIPPED_STEP:
                engine.backward(engine(micro_batch(0, 0, inner.mesh.world.rank)))
                engine.zero_grad()
            for number in range(inner.mesh.world.rank, MICRO_BATCHES, num_ranks):
                loss = engine(micro_batch(0, step, number))
                engine.backward(loss)
                digest.add(loss.item())
            digest.add(engine.step(), engine.last_grad_norm)
        return digest.of(inner), inner.optimizer.step_count


def checksums(configs: Iterable[dict[str, Any]], foreign: bool, num_ranks: int) -> list[tuple[str, int]]:
    """Returns what this rank finds with each configuration."""
    function = train_foreign if foreign else train
    return [function(parse(config, TrainConfig, "test"), num_ranks) for config in configs]


def check_bits(rank_pool: RankPool, folder: Path, layouts: Iterable[ParityLayout], precision: str) -> None:
    """Every step is clipped, the last micro-batch is short, and one step is skipped, or gradients are discarded.

    With parameters in bf16 moments are in bf16, too.
    """
    subject = Subject.built_in(folder, STEPS, precision)
    subject.prepare(folder)
    for layout in layouts:
        both = (layout.model_copy(update=dict.fromkeys(OFFLOAD_AXES, "none")), layout)
        configs = [subject.config(each).model_dump(mode="json") for each in both]
        configs[1]["offload"]["folder"] = str(folder)
        for config in configs:
            config["optimizer"]["states"] = "bf16" if precision == "bf16" else "fp32"
        for kept, moved in rank_pool.run(
            checksums, layout.num_ranks, configs=configs, foreign=layout.foreign, num_ranks=layout.num_ranks
        ):
            assert kept == moved, f"{layout} in {precision}"
            assert 0 < kept[1] < STEPS + (layout.foreign and precision != "fp16"), f"{layout} in {precision}"


@pytest.mark.every(2)
@pytest.mark.parametrize(("layout", "precision"), CHOSEN, ids=str)
def test_a_layout_has_the_bits_of_the_one_without_offload(
    rank_pool: RankPool, tmp_path: Path, layout: ParityLayout, precision: str
) -> None:
    check_bits(rank_pool, tmp_path, [layout], precision)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_all_pairs_of_values_have_the_bits_of_layouts_without_offload(
    rank_pool: RankPool, tmp_path: Path, precision: str
) -> None:
    layouts = all_pairs()
    assert {layout.offload_optimizer for layout in layouts} == {"cpu", "disk"}
    assert {layout.offload_parameters for layout in layouts} == {"none", "cpu", "disk"}
    check_bits(rank_pool, tmp_path, layouts, precision)
