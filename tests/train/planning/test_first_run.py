"""The sizes of a first run: they grow with text, time and machine, and the planner says that they fit."""

import json
from pathlib import Path

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.data.corpus_facts import CorpusFacts
from tk.tests.infer.serve.tiny_model import write_tiny_model
from tk.train.config.train_config import TrainConfig
from tk.train.planning.first_run import (
    MIN_BYTES,
    MIN_STEPS,
    MIN_TUNING_STEPS,
    MOST_EPOCHS,
    Budget,
    Model,
    fine_tuning,
    from_scratch,
    tokens_of,
    vocabulary,
)
from tk.train.planning.plan import make_plan

LAPTOP = Budget(cores=2, memory=16 << 30, num_gpus=0, has_bf16=True, minutes=5)
NODE = Budget(cores=64, memory=80 << 30, num_gpus=8, has_bf16=True, minutes=600)
SOURCES = [{"path": "tokens"}]


def text(num_bytes: int, documents: int = 1) -> CorpusFacts:
    return CorpusFacts(num_bytes, documents, examples=False, chats=False)


def chats(num_bytes: int, documents: int) -> CorpusFacts:
    return CorpusFacts(num_bytes, documents, examples=True, chats=True)


@pytest.mark.parametrize(
    ("num_bytes", "size"), [(10_000, 512), (1 << 20, 1024), (10_000_000, 2048), (10**9, 16384), (10**12, 32768)]
)
def test_the_vocabulary_is_about_the_square_root_of_the_text(num_bytes: int, size: int) -> None:
    assert vocabulary(num_bytes) == size


@pytest.mark.parametrize("budget", [LAPTOP, NODE], ids=["laptop", "node"])
def test_models_grow_with_the_text_and_are_trained_enough(budget: Budget) -> None:
    before = 0
    for num_bytes in (MIN_BYTES, 10**7, 10**10):
        run = from_scratch("mine", text(num_bytes), budget, SOURCES)
        assert run.plan.num_parameters >= before
        before = run.plan.num_parameters
        tokens = tokens_of(num_bytes, run.vocab_size)
        seen = run.plan.tokens_per_step * run.plan.steps
        assert seen <= MOST_EPOCHS * tokens * 1.05 or run.plan.steps == MIN_STEPS
        held_out = run.values["data"]["eval_fraction"] * tokens
        assert run.values["train"]["seq_len"] < held_out <= max(0.25 * tokens, 210_000)
        per_rank = max(sum(placed.device.values()) for placed in run.plan.memory)
        assert per_rank < budget.memory


def test_time_and_machine_decide_where_text_abounds() -> None:
    minute, day = (Budget(2, 16 << 30, 0, True, minutes) for minutes in (1, 1440))
    slow = Budget(2, 16 << 30, 0, False, 5)
    sizes = {
        budget: from_scratch("mine", text(10**10), budget, SOURCES).plan for budget in (minute, LAPTOP, day, slow, NODE)
    }
    assert sizes[day].num_parameters > sizes[LAPTOP].num_parameters
    assert sizes[NODE].num_parameters > 1e8
    assert sizes[LAPTOP].flops_per_step * sizes[LAPTOP].steps == pytest.approx(LAPTOP.flops, rel=0.05)
    assert from_scratch("mine", text(10**10), slow, SOURCES).values["precision"] == {"params": "fp32"}
    assert sizes[minute].steps < sizes[LAPTOP].steps
    assert sizes[NODE].layout.dp == 8
    assert sizes[NODE].layout.zero == 1


def test_little_memory_makes_a_smaller_model() -> None:
    small = Budget(2, 1 << 30, 0, True, 1440)
    large = Budget(2, 64 << 30, 0, True, 1440)
    plans = [from_scratch("mine", text(10**10), budget, SOURCES).plan for budget in (small, large)]
    assert plans[0].num_parameters < plans[1].num_parameters
    assert max(plans[0].cpu_memory) < 1 << 30


def test_a_text_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="9,999 bytes, too few"):
        from_scratch("mine", text(MIN_BYTES - 1), LAPTOP, SOURCES)


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """Writes the folder of a model with so many parameters, of which no byte of a weight is read."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64}
    config |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, **heads}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


@pytest.mark.parametrize(
    ("memory", "adapter"), [(64 << 30, False), (3 << 30, True)], ids=["memory for all", "memory for an adapter"]
)
def test_a_model_that_is_too_large_to_train_gets_an_adapter(memory: int, adapter: bool, tmp_path: Path) -> None:
    model = Model(str(write_model(tmp_path / "model", 2048, 4)), "", 2048, 4096)
    budget = Budget(8, memory, 0, True, 5)
    run = fine_tuning("mine", chats(10**6, 1000), budget, model, lora=False)
    assert ("lora" in run.values) == adapter
    assert max(run.plan.cpu_memory) < memory
    assert run.values["data"]["packing"] == "documents"
    assert "lora" in fine_tuning("mine", chats(10**6, 1000), budget, model, lora=True).values


def test_a_model_that_does_not_fit_at_all_is_refused(tmp_path: Path) -> None:
    model = Model(str(write_model(tmp_path / "model", 4096, 2)), "", 4096, 4096)
    with pytest.raises(ConfigError, match=r"even an adapter .* takes .* of memory, and 717 MiB can be used"):
        fine_tuning("mine", chats(10**6, 1000), Budget(8, 1 << 30, 0, True, 5), model, lora=False)


def test_fine_tuning_reads_the_rows_three_times(tmp_path: Path) -> None:
    model = Model(str(write_model(tmp_path / "model", 128, 2)), "mine-tokenizer", 128, 256)
    run = fine_tuning("mine", chats(10**7, 1000), Budget(64, 16 << 30, 0, True, 60), model, lora=False)
    assert run.plan.steps * run.plan.tokens_per_step == pytest.approx(3 * (10**7 / 4 + 8000), rel=0.01)
    assert run.values["train"]["seq_len"] == 256
    assert run.values["data"]["tokenizer"] == "mine-tokenizer"


def test_a_few_rows_are_learned_in_a_few_steps(tmp_path: Path) -> None:
    model = Model(str(write_model(tmp_path / "model", 128, 2)), "", 128, 256)
    run = fine_tuning("mine", chats(MIN_BYTES, 100), LAPTOP, model, lora=False)
    assert run.values["train"]["steps"] == run.plan.steps == MIN_TUNING_STEPS
    assert run.values["optimizer"]["warmup_steps"] == 2


def test_what_is_planned_is_what_the_file_says(tmp_path: Path) -> None:
    model = Model(str(write_model(tmp_path / "model", 128, 2)), "", 128, 256)
    for run in (
        from_scratch("mine", text(10**7), LAPTOP, "stdlib"),
        fine_tuning("mine", chats(10**6, 1000), LAPTOP, model, lora=True),
    ):
        config = parse(run.values, TrainConfig, "values")
        assert config.run_folder == Path("runs/mine")
        assert make_plan(config, None).steps == run.plan.steps
