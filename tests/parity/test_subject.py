"""The subject of a comparison: the configuration of each layout, its reference, and layouts that are refused."""

from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import ConfigError, ParallelError
from tk.parity.layout import ParityLayout
from tk.parity.subject import Subject
from tk.train.config.sections import OffloadSection, ParallelSection, RecomputeSection, ZeroSection


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject.built_in(tmp_path, 4, "fp32")


def test_a_layout_becomes_a_configuration(subject: Subject) -> None:
    layout = ParityLayout(
        tp=2, pp=2, dp=2, zero=3, shard_size=1, sequence_parallel=True, recompute="full", offload_optimizer="disk"
    )
    config = subject.config(layout)
    parallel = config.parallel
    assert (parallel.tp, parallel.pp, parallel.dp, parallel.sequence_parallel) == (2, 2, 2, True)
    assert (config.zero.stage, config.zero.shard_size, config.recompute.mode) == (3, 1, "full")
    assert (config.offload.optimizer, subject.config(ParityLayout()).offload) == ("disk", OffloadSection())
    assert config.train.steps == 4
    assert config.model.num_hidden_layers == 3, "one stage has more layers than the other"


@pytest.mark.parametrize(("pp", "dp", "rows"), [(1, 1, 3), (1, 2, 5), (4, 1, 7), (4, 2, 5)])
def test_the_last_micro_batch_is_short(pp: int, dp: int, rows: int, subject: Subject) -> None:
    config = subject.config(ParityLayout(pp=pp, dp=dp))
    assert config.train.global_batch_size == rows
    assert rows % (2 * dp) == 1, "all ranks together have a single row in it"


@pytest.mark.parametrize(("kv_heads", "number"), [("heads", 8), ("fewer", 4), ("fewer than tp", 2), (None, None)])
def test_kv_heads_are_those_of_the_layout(kv_heads: Any, number: int | None, subject: Subject) -> None:
    found = subject.config(ParityLayout(tp=4, kv_heads=kv_heads, tied=True)).model
    assert found.num_key_value_heads == (number or subject.base.model.num_key_value_heads)
    assert found.tie_word_embeddings


def test_the_reference_differs_only_in_the_layout(subject: Subject) -> None:
    layout = ParityLayout(tp=2, dp=2, zero=2, recompute="selective", tied=True, offload_optimizer="cpu")
    config, reference = subject.config(layout), subject.reference(layout)
    assert reference.layout(1).world_size == 1
    assert (reference.parallel, reference.zero, reference.recompute, reference.offload) == (
        ParallelSection(), ZeroSection(), RecomputeSection(), OffloadSection()
    )  # fmt: skip
    same = ("model", "data", "train", "optimizer", "precision", "checkpoint")
    assert all(getattr(config, name) == getattr(reference, name) for name in same)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (ParityLayout(tp=16), "num_attention_heads"),
        (ParityLayout(tp=1, kv_heads="fewer than tp"), "cannot have fewer kv heads than tp"),
        (ParityLayout(foreign=True, tp=2), "leave out tp"),
        (ParityLayout(foreign=True, dp=3), "dp = 3 must divide that"),
        (ParityLayout(dp=2, zero=1, shard_size=3), "use a divisor of dp"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_before_a_process_starts(
    layout: ParityLayout, said: str, subject: Subject
) -> None:
    with pytest.raises((ConfigError, ParallelError), match=said):
        subject.check(layout)
    subject.check(ParityLayout(tp=4, pp=2, zero=0))
    subject.check(ParityLayout(foreign=True, dp=4, zero=3))


def test_a_foreign_module_is_compared_in_fp32_beside_the_built_in_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only in fp32"):
        Subject.built_in(tmp_path, 4, "bf16").check(ParityLayout(foreign=True, dp=2))
