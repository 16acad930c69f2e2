"""What `initialize` finds out about an adapter before it takes a module over: one on all ranks, and its base."""

from pathlib import Path

import pytest

from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import ConfigError
from tk.tests.rank_pool import RankPool
from tk.tests.train.foreign.test_peft_adapter import lora
from tk.tests.train.frozen_steps import OPTIMIZER, small_llama
from tk.train import initialize

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def take_over_with_other_scales() -> str:
    """Returns the error of an adapter that has another alpha on each rank."""
    import torch.distributed as dist

    try:
        initialize(lora(small_llama(), lora_alpha=8 << dist.get_rank()), OPTIMIZER)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_other_adapters_are_refused(rank_pool: RankPool) -> None:
    for error in rank_pool.run(take_over_with_other_scales, 2):
        assert "initialize needs the same model and arguments on all ranks: rank 1 has " in error
        assert "alpha=16.0" in error


def test_the_values_of_a_folder_of_weights_are_of_no_known_base(tmp_path: Path) -> None:
    model = lora(small_llama())
    whole = lora(small_llama())
    small_llama().save_pretrained(tmp_path / "base")
    whole.base_model.model.lm_head.weight.requires_grad_(True)  # so that it is saved whole
    initialize(whole, OPTIMIZER).save(tmp_path / "whole", wait=True)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    engine = initialize(model, OPTIMIZER, weights=tmp_path / "whole")
    engine.save(tmp_path / "run", wait=True)
    record = Checkpoint.open(tmp_path / "run").manifest.adapter
    assert record is not None
    assert (record.base.identity, record.base.path) == ("", str(tmp_path / "base"))
